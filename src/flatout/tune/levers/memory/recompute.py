"""Activations of the model's repeated blocks are computed again in the backward instead of kept.

What        `torch.utils.checkpoint` around each block (or the first of them: the parameter `fraction`) in training.
Guarantee   EXACT: the same operators on the same numbers, random masks included.
Refuses     Runs without repeated blocks whose activations weigh anything; blocks with batch norm, which would count twice;
            runs that recompute already.
Costs       Time: a forward of these blocks. It is for memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.memory import main_memory
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.source import (
    assigned_in,
    code_of,
    editable_place,
    names_in,
    nodes_of,
    parsed,
    with_changes,
    with_expression,
)

if TYPE_CHECKING:
    from torch import nn

_SMALLEST_SHARE = 0.05
_FRACTIONS = (1.0, 0.5)
_BLOCK = re.compile(r"^(?P<holder>.+?)\.(?P<number>\d+)(?:\.|$)")


class _Blocks(NamedTuple):
    """What was seen in one container: bytes saved for the backward, seconds of the forward, number of blocks, lines above."""

    holder: str
    num_bytes: int
    forward_s: float
    num: int
    lines: tuple[int, ...]


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose all blocks, or half of them, of the container that frees most memory for each second."""
    memory = main_memory(evidence)
    if evidence.steps.kind != "training" or memory is None:
        raise LeverRefused("no training step's memory was recorded")
    if any(f.name == "recompute" for f in evidence.module_facts):
        raise LeverRefused("the script recomputes already")
    able = [b for b in _repeated_blocks(evidence) if b.num > 1 and b.num_bytes > _SMALLEST_SHARE * memory.peak_bytes]
    if not able:
        raise LeverRefused("no repeated blocks hold activations worth the name at the peak")
    best = max(able, key=lambda b: b.num_bytes / max(b.forward_s, 1e-9))
    container = best.holder.partition(".")[2]
    places = (editable_place(evidence, evidence.source_of(line), edit, container=container) for line in best.lines)
    place: Parameters = next(({"file": place["file"]} for place in places if place), {})
    for fraction in _FRACTIONS:
        # The block that is under way in the backward is whole again.
        inputs_bytes = best.num_bytes / best.num
        again_s = fraction * best.forward_s
        yield Candidate(
            parameters=place | {"container": container, "fraction": fraction},
            saved_s=(-2.0 * again_s, -0.3 * again_s),
            saved_bytes=max(1, round(fraction * best.num_bytes - inputs_bytes)),
            where=evidence.source_of(best.lines[0]) if best.lines else None,
            because=f"{best.num} blocks of {best.holder} keep {best.num_bytes / 2**20:.0f} MiB of activations at the peak; their "
            f"forward takes {best.forward_s * 1e3:.2f} ms",
        )


def _repeated_blocks(evidence: Evidence) -> list[_Blocks]:
    memory = main_memory(evidence)
    num_bytes: dict[str, int] = defaultdict(int)
    numbers: dict[str, set[str]] = defaultdict(set)
    for part in memory.at_peak if memory is not None else ():
        found = _BLOCK.match(part.module)
        if part.kind == "activations" and found:
            num_bytes[found["holder"]] += part.bytes
    seconds: dict[str, float] = defaultdict(float)
    lines: dict[str, dict[int, None]] = defaultdict(dict)
    for operator in evidence.operators:
        found = _BLOCK.match(operator.module)
        if operator.phase == "forward" and found:
            numbers[found["holder"]].add(found["number"])
            seconds[found["holder"]] += operator.total_s
            for line in (operator.source, *evidence.callers.get(operator.source, ())):
                lines[found["holder"]][line] = None
    return [_Blocks(h, num_bytes[h], seconds[h], len(numbers[h]), tuple(lines[h])) for h in num_bytes]


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Wrap the blocks of each model that has them at its first call."""
    from flatout.blocks.training.recompute import recompute

    fraction, container = parameters.get("fraction", 1.0), str(parameters.get("container", ""))
    if isinstance(fraction, (str, tuple)) or not 0.0 <= float(fraction) <= 1.0:
        raise PlanError(f"parameter 'fraction' is {fraction!r} and must be a number between 0 and 1")

    def wrap(module: nn.Module) -> Callable[[], None] | None:
        inner = getattr(module, "module", module) if type(module).__name__ == "DistributedDataParallel" else module
        paths, undo = recompute(inner, fraction=float(fraction), container=container)
        if paths:
            hooks.note(LEVER.id)
        return undo

    hooks.at_first_call(wrap)


def edit(text: str, parameters: Parameters) -> str:
    """Write `x = checkpoint(block, x, use_reentrant=False)` for `x = block(x)` in a loop over the blocks."""
    if parameters.get("fraction", 1.0) != 1.0:
        raise EditError("a part of the blocks is recomputed; the edit is for all of them")
    if "BatchNorm" in text:
        raise EditError("batch norm would count each batch twice")
    module, name = parsed(text), str(parameters.get("container", "")).rpartition(".")[2]
    loops = [f for f in nodes_of(cst.For, module) if _is_over_blocks(f, name)]
    wholes = list(_wholes(module, name)) if name else []
    if len(loops) + len(wholes) != 1:
        raise EditError(f"{len(loops) + len(wholes) or 'no'} places call the blocks of the model one after the other")
    if loops:
        [call] = _calls(loops[0])
        changed = with_expression(module, call, _checkpointed(call))
    else:
        changed = _unrolled(module, wholes[0])
    return with_import(changed, "torch.utils.checkpoint", "checkpoint").code


def _is_over_blocks(loop: cst.For, container: str) -> bool:
    is_named = isinstance(loop.iter, cst.Attribute) and (loop.iter.attr.value == container if container else True)
    if not is_named or not isinstance(loop.target, cst.Name):
        return False
    name = loop.target.value
    return len(_calls(loop)) == len(m.findall(loop.body, m.Name(name))) == 1 and name not in assigned_in(loop.body)


def _calls(loop: cst.For) -> list[cst.Call]:
    """Calls of the loop's variable whose result is assigned."""
    values = [
        a.value
        for a in nodes_of(cst.Assign, loop.body)
        if m.matches(a.value, m.Call(func=m.Name(code_of(loop.target))))
    ]
    calls = [value for value in values if isinstance(value, cst.Call)]
    return [call for call in calls if call.args and not any(a.star for a in call.args)]


def _checkpointed(call: cst.Call) -> cst.BaseExpression:
    inputs = ", ".join(code_of(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in call.args)
    return cst.parse_expression(f"checkpoint({code_of(call.func)}, {inputs}, use_reentrant=False)")


class _Whole(NamedTuple):
    """A call of the whole container in a statement at the top of a function, and the name that goes through it."""

    line: cst.SimpleStatementLine
    call: cst.Call
    name: str


def _wholes(module: cst.Module, container: str) -> Iterator[_Whole]:
    """Calls `self.blocks(...)` that can be put before their statement: what goes in is one name that nobody else reads."""
    shape = m.Call(func=m.Attribute(value=m.Name("self"), attr=m.Name(container)), args=[m.Arg(keyword=None, star="")])
    for function in m.findall(module, m.FunctionDef(body=m.IndentedBlock())):
        assert isinstance(function, cst.FunctionDef)
        for index, line in enumerate(function.body.body):
            calls = m.findall(line, shape)
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1 or len(calls) != 1:
                continue
            [call] = calls
            assert isinstance(call, cst.Call)
            inputs = {n for n in names_in(call.args[0].value) if n != "self" and not call_name(module, cst.Name(n))}
            later = [s for s in function.body.body[index + 1 :] if isinstance(s, cst.CSTNode)]
            if len(inputs) == 1 and _is_free(line, min(inputs), later):
                yield _Whole(line, call, min(inputs))


def _is_free(line: cst.SimpleStatementLine, name: str, later: Sequence[cst.CSTNode]) -> bool:
    """Whether a name that is read once in a statement may hold something else from there on."""
    [only] = line.body
    hides = m.IfExp() | m.BooleanOperation() | m.Lambda() | m.GeneratorExp() | m.ListComp() | m.DictComp() | m.SetComp()
    value = only.value if isinstance(only, (cst.Assign, cst.Return)) else None
    if value is None or m.findall(value, hides) or len(m.findall(value, m.Name(name))) != 1:
        return False
    return name in assigned_in(line) or name not in names_in(later)


def _unrolled(module: cst.Module, whole: _Whole) -> cst.Module:
    """A loop over the blocks before the statement, which reads what comes out of it."""
    line, call, name = whole
    inputs, container = call.args[0].value, code_of(call.func)
    before = [] if isinstance(inputs, cst.Name) else [f"{name} = {code_of(inputs)}"]
    loop = f"for block in {container}:\n    {name} = checkpoint(block, {name}, use_reentrant=False)"
    new = [cst.parse_statement(text + "\n", config=module.config_for_parsing) for text in (*before, loop)]
    rest = with_expression(line, call, cst.Name(name)).with_changes(leading_lines=())
    is_same = isinstance(rest.body[0], cst.Assign) and code_of(rest) == f"{name} = {name}"
    return with_changes(module, {line: new if is_same else [*new, rest]})


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Activations recomputed in the backward")
