"""Products of the loss over a large vocabulary in float8 while it trains.

What        `logits = self.head(x)` and `F.cross_entropy(logits.view(-1, V), targets.view(-1))` become, where gradients are
            recorded, `linear_cross_entropy(x, self.head.weight, targets, float8=True)`; logits that the function returns are None
            then. Evaluation stays as it is.
Guarantee   QUALITY: the metric tells. Hidden states and the weight are rounded to 3 bits after the point (e4m3, one scale each),
            the gradient of the logits to 2 (e5m2); sums are float32.
Price       `bench/losses_device.py` on an H200, torch 2.11: gradients are off by 4 % where those of bfloat16 are off by 0.3 %.
Refuses     GPUs below compute capability 8.9; products in float16; small vocabularies; logits that the function uses for
            more than the loss and what it returns; heads that are not nn.Linear as the class shows. Of products in float32 it
            promises what they gain once `workload.mixed-precision` has them in bfloat16.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Final, NamedTuple

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.families import COMPILED_GRAPH
from flatout.tune.levers.float8_units import bfloat16_seconds, check_gains, float8_rate
from flatout.tune.rewrite.flow import Flow, bound_in
from flatout.tune.rewrite.imports import with_import, with_torch
from flatout.tune.rewrite.linear_losses import BLOCK, LinearLoss, fused_call, linear_loss
from flatout.tune.rewrite.source import MODULE, first_line, parsed, places_in, project_files, statements, with_changes

_LOSS: Final = "cross_entropy"
_LARGE_VOCABULARY: Final = 8192
"""Below, casts take longer than the products gain: our guess, none was measured."""
_SMALL_SHARE: Final = 0.04
"""Of a step, in seconds that float8 saves at most."""
_FUSED: Final = 1.5
"""The loss is made in fewer passes besides: on an H200, a GPT-2 small saved 1.5 times what its products gained
(bench/results/2026-11-27-h200)."""


class _LargeHead(NamedTuple):
    """The products of a layer with a large vocabulary: seconds of a step, those that bfloat16 takes, and its sizes."""

    seconds: float
    bfloat16_s: float
    width: int
    vocabulary: int


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where a loss over a large vocabulary takes much of a training step."""
    check_gains(evidence)
    head = _head(evidence)
    rate = float8_rate(evidence)
    saved = _FUSED * (1 - 1 / rate)
    if saved * head.seconds < _SMALL_SHARE * evidence.steps.whole_s:
        raise LeverRefused(
            f"a loss over {head.vocabulary} classes takes {milliseconds(head.seconds)} of a step at most"
        )
    for place in _places(evidence):
        yield Candidate(
            parameters=place,
            saved_s=(0.0, saved * head.bfloat16_s),
            replaces=("memory.chunked-loss",),
            because=f"products of {head.width} by {head.vocabulary} classes take up to {milliseconds(head.bfloat16_s)} of a step "
            f"in bfloat16; in float8 the units are {rate:.1f} times as fast",
        )


def _head(evidence: Evidence) -> _LargeHead:
    """The largest layer over a vocabulary: products observed one by one, else its share of compiled graphs' products."""
    graphs = [o for o in evidence.operators if o.op == COMPILED_GRAPH]
    if not graphs:
        return _observed_head(evidence)
    matrices = {
        t.shape for o in graphs for t in o.inputs if len(t.shape) == 2 and t.dtype.startswith(("float", "bfloat"))
    }
    n, k = max(matrices, default=(0, 0))
    rates = evidence.machine.matmul_flop_per_s if evidence.machine is not None else {}
    _check_vocabulary(n)
    if not rates.get("bfloat16"):
        raise LeverRefused("how fast bfloat16 products are on this machine was not measured")
    seconds = min(sum(o.flop * o.num_calls for o in graphs) / rates["bfloat16"], sum(o.op_s for o in graphs))
    seconds *= n * k / sum(rows * columns for rows, columns in matrices)
    return _LargeHead(seconds, seconds, k, n)


def _observed_head(evidence: Evidence) -> _LargeHead:
    products = [o for o in evidence.operators if o.op in ("aten.mm", "aten.addmm")]
    shapes = {o: [t.shape for t in o.inputs[-2:] if len(t.shape) == 2] for o in products}
    n, k = max(((s[1][1], s[1][0]) for o, s in shapes.items() if len(s) == 2 and o.phase == "forward"), default=(0, 0))
    _check_vocabulary(n)
    of_head = [o for o, pair in shapes.items() if any(n in shape for shape in pair)]
    return _LargeHead(sum(o.op_s for o in of_head), sum(bfloat16_seconds(evidence, o) for o in of_head), k, n)


def _check_vocabulary(size: int) -> None:
    if size < _LARGE_VOCABULARY:
        raise LeverRefused("no layer over a large vocabulary was seen")


def _places(evidence: Evidence) -> Iterator[Parameters]:
    """Where the script's own files have such a loss that can be changed. Raises LeverRefused where none has."""
    why, num_found = "no cross entropy of a linear layer's result was found in the script's files", 0
    for file, text in project_files(evidence):
        module = parsed(text)
        for place in places_in(module) if _LOSS in text else ():
            statement = place.statement
            if not isinstance(statement, cst.SimpleStatementLine) or _LOSS not in module.code_for_node(statement):
                continue
            parameters: Parameters = {
                "file": file,
                "function": place.scope if place.function is not None else MODULE,
                "code": first_line(module, statement),
            }
            try:
                edit(text, parameters)
            except EditError as e:
                why = str(e)
                continue
            num_found += 1
            yield parameters
    if not num_found:
        raise LeverRefused(why)


def edit(text: str, parameters: Parameters) -> str:
    """Put the loss with float8 products where gradients are recorded, and leave what was there for where they are not.

    Raises EditError when the head or the loss is not recognised, or the logits are used besides, other than to be returned.
    """
    flow = Flow(text, parameters)
    loss = linear_loss(flow)
    block = sorted({*loss.removed, loss.last.at})
    if block != list(range(block[0], loss.last.at + 1)):
        raise EditError("something else stands between the linear layer and its loss")
    returned = _returned_names(flow, loss)
    call, _ = fused_call(flow, loss, "float8=True")
    torch = with_torch(flow.module)[1]
    training = flow.with_segment(loss.last, call) + "".join(f"{name} = None\n" for name in returned)
    [branch] = statements(f"if {torch}.is_grad_enabled():\n{indent(training, '    ')}else:\n    pass\n")
    originals = [flow.place.block[i] for i in block]
    lines = getattr(originals[0], "leading_lines", ())
    originals[0] = originals[0].with_changes(leading_lines=())
    otherwise = cst.Else(body=cst.IndentedBlock(originals))
    new = cst.ensure_type(branch, cst.If).with_changes(leading_lines=lines, orelse=otherwise)
    gone: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = {flow.place.block[i]: () for i in block}
    module = with_changes(flow.module, gone | {flow.place.block[block[0]]: [new]})
    return with_import(with_torch(module)[0], "flatout", BLOCK).code


def _returned_names(flow: Flow, loss: LinearLoss) -> list[str]:
    """Names of logits that the function only returns besides. Raises EditError where it does more with one."""
    found = []
    returns = [n.value for n in ast.walk(flow.scope) if isinstance(n, ast.Return) and n.value is not None]
    plain = [part for value in returns for part in _parts(value)]
    inside = [flow.trees[i] for i in loss.removed] + [loss.last.node]
    for name in sorted(set().union(*(bound_in(flow.trees[i]) for i in loss.removed))):
        reads = _num_reads(flow.scope, name) - sum(_num_reads(tree, name) for tree in inside)
        num_returned = sum(isinstance(part, ast.Name) and part.id == name for part in plain)
        if reads != num_returned:
            raise EditError(f"'{name}' is used for more than the loss")
        if num_returned:
            found.append(name)
    if any(isinstance(flow.trees[loss.last.at], kind) for kind in (ast.Return, ast.AugAssign)) and found:
        raise EditError(f"'{found[0]}' is returned together with the loss")
    return found


def _num_reads(tree: ast.AST, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(tree))


def _parts(value: ast.expr) -> list[ast.expr]:
    """What is returned as it is: a value, the items of a tuple, list or dictionary, the arguments of a record."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return list(value.elts)
    if isinstance(value, ast.Dict):
        return list(value.values)
    if isinstance(value, ast.Call):
        return [*value.args, *(k.value for k in value.keywords)]
    return [value]


LEVER = lever(
    __name__,
    propose,
    edit=edit,
    conflicts=("memory.chunked-loss",),
    title="Products of the loss in float8",
)
