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

from flatout.cost.memory import main_memory
from flatout.errors import EditError, PlanError
from flatout.levers.syntax.imports import call_name, with_import
from flatout.levers.syntax.source import (
    assigned_in,
    code_of,
    names_in,
    parsed,
    place_of,
    text_at,
    with_expression,
    with_statements,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

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


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """All blocks, or half of them, of the container that frees most memory for each second."""
    memory = main_memory(evidence)
    if evidence.steps.kind != "training" or memory is None:
        yield Refusal(lever=LEVER.id, because="no training step's memory was seen")
        return
    if any(f.name == "recompute" for f in evidence.module_facts):
        yield Refusal(lever=LEVER.id, because="the script recomputes already")
        return
    able = [b for b in _seen(evidence) if b.num > 1 and b.num_bytes > _SMALLEST_SHARE * memory.peak_bytes]
    if not able:
        yield Refusal(lever=LEVER.id, because="no repeated blocks hold activations worth the name at the peak")
        return
    best = max(able, key=lambda b: b.num_bytes / max(b.forward_s, 1e-9))
    place = _place(evidence, best)
    for fraction in _FRACTIONS:
        # The block that is under way in the backward is whole again.
        kept = best.num_bytes / best.num
        again_s = fraction * best.forward_s
        yield Candidate(
            lever=LEVER.id,
            parameters=place | {"container": best.holder.partition(".")[2], "fraction": fraction},
            saved_s=(-2.0 * again_s, -0.3 * again_s),
            saved_bytes=max(1, round(fraction * best.num_bytes - kept)),
            where=evidence.source_of(best.lines[0]) if best.lines else None,
            because=f"{best.num} blocks of {best.holder} keep {best.num_bytes / 2**20:.0f} MiB of activations at the peak; their "
            f"forward takes {best.forward_s * 1e3:.2f} ms",
        )


def _seen(evidence: Evidence) -> list[_Blocks]:
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


def _place(evidence: Evidence, blocks: _Blocks) -> Parameters:
    """The file whose model can be edited, where that is certain."""
    container = blocks.holder.partition(".")[2]
    for line in blocks.lines:
        where = evidence.source_of(line)
        try:
            place: Parameters = {"file": place_of(evidence, where)["file"]} if where is not None else {}
            if place:
                edit(text_at(evidence, place), place | {"container": container})
                return place
        except EditError:
            continue
    return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Wrap the blocks of each model that has them, when it is first called."""
    from flatout.training.recompute import recompute

    fraction, container = parameters.get("fraction", 1.0), str(parameters.get("container", ""))
    if isinstance(fraction, (str, tuple)) or not 0.0 <= float(fraction) <= 1.0:
        raise PlanError(f"parameter 'fraction' is {fraction!r} and must be a number between 0 and 1")

    def wrap(module: nn.Module) -> Callable[[], None] | None:
        inner = getattr(module, "module", module) if type(module).__name__ == "DistributedDataParallel" else module
        paths, undo = recompute(inner, fraction=float(fraction), container=container)
        if paths:
            seams.note(LEVER.id)
        return undo

    seams.at_first_call(wrap)


def edit(text: str, parameters: Parameters) -> str:
    """`x = block(x)` in a loop over the blocks becomes `x = checkpoint(block, x, use_reentrant=False)`."""
    if parameters.get("fraction", 1.0) != 1.0:
        raise EditError("a part of the blocks is recomputed; the edit is for all of them")
    if "BatchNorm" in text:
        raise EditError("batch norm would count each batch twice")
    module, name = parsed(text), str(parameters.get("container", "")).rpartition(".")[2]
    loops = [f for f in m.findall(module, m.For()) if isinstance(f, cst.For) and _is_over_blocks(f, name)]
    wholes = list(_wholes(module, name)) if name else []
    if len(loops) + len(wholes) != 1:
        raise EditError(f"{len(loops) + len(wholes) or 'no'} places call the blocks of the model one after the other")
    if loops:
        changed = with_expression(module, _call_in(loops[0]), _checkpointed(_call_in(loops[0])))
    else:
        changed = _unrolled(module, wholes[0])
    return with_import(changed, "torch.utils.checkpoint", "checkpoint").code


def _is_over_blocks(loop: cst.For, name: str) -> bool:
    is_named = isinstance(loop.iter, cst.Attribute) and (loop.iter.attr.value == name if name else True)
    if not is_named or not isinstance(loop.target, cst.Name):
        return False
    return len(_calls(loop)) == 1 and _uses(loop) == 1 and loop.target.value not in assigned_in(loop.body)


def _calls(loop: cst.For) -> list[cst.Call]:
    """Calls of the loop's variable whose result is assigned."""
    found = []
    for line in m.findall(loop.body, m.Assign(value=m.Call(func=m.Name(code_of(loop.target))))):
        assert isinstance(line, cst.Assign) and isinstance(line.value, cst.Call)
        found += [line.value] if not any(a.star for a in line.value.args) and line.value.args else []
    return found


def _uses(loop: cst.For) -> int:
    return len(m.findall(loop.body, m.Name(code_of(loop.target))))


def _call_in(loop: cst.For) -> cst.Call:
    return _calls(loop)[0]


def _checkpointed(call: cst.Call) -> cst.BaseExpression:
    given = ", ".join(code_of(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in call.args)
    return cst.parse_expression(f"checkpoint({code_of(call.func)}, {given}, use_reentrant=False)")


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
            given = {n for n in names_in(call.args[0].value) if n != "self" and not call_name(module, cst.Name(n))}
            later = [s for s in function.body.body[index + 1 :] if isinstance(s, cst.CSTNode)]
            if len(given) == 1 and _is_free(line, min(given), later):
                yield _Whole(line, call, min(given))


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
    given, container = call.args[0].value, code_of(call.func)
    before = [] if isinstance(given, cst.Name) else [f"{name} = {code_of(given)}"]
    loop = f"for block in {container}:\n    {name} = checkpoint(block, {name}, use_reentrant=False)"
    new = [cst.parse_statement(text + "\n", config=module.config_for_parsing) for text in (*before, loop)]
    rest = with_expression(line, call, cst.Name(name)).with_changes(leading_lines=())
    is_same = isinstance(rest.body[0], cst.Assign) and code_of(rest) == f"{name} = {name}"
    return with_statements(module, {line: new if is_same else [*new, rest]})


LEVER = Lever(
    id="memory.recompute",
    title="Activations recomputed in the backward",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
