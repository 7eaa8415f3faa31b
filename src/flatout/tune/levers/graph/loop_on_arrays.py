"""A loop over single elements of tensors computes with NumPy arrays.

What        `with as_arrays(...)` (from flatout) around the loop, and the arrays in it in place of the tensors: a return or an
            advantage that is summed up backwards in time, for example. On a device they are copied once, before and after.
Guarantee   BOUNDED: the same arithmetic in the same order and precision; Booleans and integers are divided in float64.
Refuses     Loops that do more than arithmetic on elements (calls, lists, random numbers); names that are read after the loop;
            elements that are looked at again after they were overwritten; tensors whose gradients are recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import libcst as cst
import msgspec
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import milliseconds, step_loops
from flatout.tune.rewrite.enclosing_blocks import occurrences, read_elsewhere, root_name, scope_of
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.numeric_loops import numeric_constants
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    bare_names,
    code_of,
    editable_place,
    find,
    free_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
    with_names,
    word_set,
)

_BLOCK: Final = "as_arrays"
_SMALL_PART: Final = 0.02
_FEWEST_SAMPLES: Final = 8
_SAVED: Final = (0.5, 0.95)
"""Of the loop's time: an operator on a number took 2 us on a CPU and 8 us on a GPU, on a number of NumPy 0.1 to 0.5 us."""
_LONG: Final = 100
"""Characters of a line that a person would break."""
_CALLS: Final = word_set("range reversed len min max abs float int bool")
_UNKNOWN: Final = word_set(
    "Try TryStar With FunctionDef ClassDef Raise Import ImportFrom Global Nonlocal Del Yield Await Lambda Dict DictComp Set "
    "SetComp List ListComp GeneratorExp FormattedString ConcatenatedString SimpleString StarredElement Match Return Assert "
    "NamedExpr MatrixMultiply"
)

_RANGE: Final = m.Call(func=m.Name("range"))


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each loop in which samples found much of a step, and the edit is certain."""
    is_proposed = False
    for loop, seconds in _sampled_loops(evidence).items():
        place = editable_place(evidence, loop, edit, loop=True)
        if place:
            is_proposed = True
            yield Candidate(
                parameters=place,
                saved_s=(_SAVED[0] * seconds, _SAVED[1] * seconds),
                where=loop,
                because=f"a loop computes with single elements of tensors for {milliseconds(seconds)} of a step",
            )
    if not is_proposed:
        raise LeverRefused("no loop computes with single elements of tensors for a time that counts")


def _sampled_loops(evidence: Evidence) -> dict[Source, float]:
    """Seconds of a step in loops that are no loop over steps, by samples; a loop and those around it each with what is inside."""
    own = step_loops(evidence)
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    samples: dict[tuple[str, int], int] = defaultdict(int)
    first: dict[tuple[str, int], Source] = {}
    for row in evidence.lines:
        line = evidence.source_of(row.source)
        if line is None or row.process != "main" or row.phase in ("backward", "optimizer") or line.via:
            continue
        for number, loop in enumerate(line.loops, 1):
            if (line.file, loop) not in own:
                seconds[line.file, loop] += row.seconds
                samples[line.file, loop] += row.num_samples
                first.setdefault((line.file, loop), msgspec.structs.replace(line, loops=line.loops[:number]))
    least_s = _SMALL_PART * evidence.steps.whole_s
    return {
        first[loop]: total
        for loop, total in sorted(seconds.items(), key=lambda item: -item[1])
        if total >= least_s and samples[loop] >= _FEWEST_SAMPLES
    }


class _Loop(NamedTuple):
    """What a loop of arithmetic reads and writes: values from outside, tensors that it writes elements of."""

    read: tuple[str, ...]
    written: tuple[str, ...]


def edit(text: str, parameters: Parameters) -> str:
    """Put the loop under `with as_arrays(...)`.

    Raises EditError where that is not certain.
    """
    place = find(text, parameters)
    loop = place.statement
    if not isinstance(loop, cst.For):
        raise EditError(f"'{parameters['code']}' is no loop")
    found = _judged(place, loop)
    taken = names_in(place.module)
    names = {name: free_name(f"{name}_np", taken) for name in (*found.read, *found.written)}
    into = ", ".join(found.written) + ("," if len(found.written) == 1 else "")
    values = ", ".join([*found.read, f"into=({into})"])
    arrays = ", ".join(names.values()) + ("," if len(names) == 1 else "")
    line = f"with {_BLOCK}({values}) as ({arrays}):\n    pass\n"
    if len(line) > _LONG:
        line = f"with {_BLOCK}(\n    {values}\n) as (\n    {arrays}\n):\n    pass\n"
    [around] = statements(line)
    assert isinstance(around, cst.With)
    inside = with_names(loop.with_changes(leading_lines=()), names)
    around = around.with_changes(body=cst.IndentedBlock([inside]), leading_lines=loop.leading_lines)
    changes: dict[cst.CSTNode, Change] = {loop: [around]}
    return with_import(with_changes(place.module, changes), "flatout", _BLOCK).code


def _judged(place: SourcePlace, loop: cst.For) -> _Loop:
    """Raises EditError where the loop is more than arithmetic on elements."""
    _check_arithmetic(loop)
    scope = with_changes(scope_of(place.module, place.function), {loop: lambda _: []})
    loops = nodes_of(cst.For, loop)
    counters = {name for inner in loops for name in names_in(inner.target)}
    bound = {name for statement in loop.body.body for name in assigned_in(statement)} - counters
    written, indexed = _written(loop), {root_name(s) for s in nodes_of(cst.Subscript, loop)}
    if not written:
        raise EditError("no element of a tensor is written")
    if late := sorted((bound | counters) & read_elsewhere(place.module, place.function, loop)):
        raise EditError(f"'{late[0]}' is read after the loop")
    for assigned in nodes_of(cst.Assign, loop.body):
        if isinstance(assigned.value, cst.Subscript) and root_name(assigned.value) in written:
            raise EditError(f"'{code_of(assigned)}' may be overwritten before it is read")
    holders = {root_name(a) for a in nodes_of(cst.Attribute, loop)}  # `args.gamma` is read where it is
    if both := sorted(holders & (indexed | bound)):
        raise EditError(f"an attribute of '{both[0]}' is read in the loop")
    carried = {name for name in bound if _is_read_first(loop.body, name)}
    before = assigned_in(scope) | (names_in(place.function.params) if place.function is not None else set())
    if unknown := sorted(carried - before | carried & written):
        raise EditError(f"what '{unknown[0]}' is before the loop is unknown")
    plain = counters | holders | _CALLS | numeric_constants(place.module) | _counts(loop) | (bound - carried)
    names = dict.fromkeys(n.value for n in bare_names(loop.body))
    read = (n for n in names if n not in plain | written and not call_name(place.module, cst.Name(n)))
    return _Loop(tuple(read), tuple(n for n in names if n in written))


def _check_arithmetic(loop: cst.For) -> None:
    if loop.orelse is not None or loop.asynchronous is not None:
        raise EditError("the loop has an else")
    for node in m.findall(loop, m.MatchIfTrue(lambda found: type(found).__name__ in _UNKNOWN)):
        raise EditError(f"'{code_of(node).splitlines()[0]}' is no arithmetic on elements")
    for call in nodes_of(cst.Call, loop):
        if not isinstance(call.func, cst.Name) or call.func.value not in _CALLS:
            raise EditError(f"'{code_of(call)}' is called in the loop")
    for target in m.findall(loop.body, m.AssignTarget() | m.AugAssign()):
        one = target.target  # type: ignore[attr-defined]
        if not isinstance(one, (cst.Name, cst.Subscript)):
            raise EditError(f"'{code_of(one)}' is written in the loop")
        if isinstance(one, cst.Subscript) and not isinstance(one.value, cst.Name):
            raise EditError(f"'{code_of(one)}' is written in the loop")
    for inner in nodes_of(cst.For, loop):
        if not m.matches(inner.iter, _RANGE | m.Call(func=m.Name("reversed"), args=[m.Arg(_RANGE)])):
            raise EditError(f"a loop goes over '{code_of(inner.iter)}', and not over a range")


def _written(loop: cst.For) -> set[str]:
    """Names of which the loop writes elements."""
    targets = [t.target for t in m.findall(loop.body, m.AssignTarget() | m.AugAssign())]  # type: ignore[attr-defined]
    return {t.value.value for t in targets if isinstance(t, cst.Subscript) and isinstance(t.value, cst.Name)}


def _counts(loop: cst.For) -> set[str]:
    """Names that stand in ranges and in indices alone: numbers, which stay as they are."""
    inside: set[cst.Name] = set()
    for node in [*nodes_of(cst.SubscriptElement, loop), *(i.iter for i in nodes_of(cst.For, loop)), loop.iter]:
        subscripts = {id(n) for s in nodes_of(cst.Subscript, node) for n in bare_names(s.value)}
        inside |= {n for n in bare_names(node) if id(n) not in subscripts}
    known = {id(n) for n in inside}
    names = {n.value for n in inside}
    return {name for name in names if all(id(n) in known for n in occurrences(loop, name))}


def _is_read_first(body: cst.BaseSuite, name: str) -> bool:
    """Whether an iteration may read a name before it gives it a value."""
    for statement in body.body:
        found = occurrences(statement, name)
        if not found:
            continue
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Assign):
            targets = [t.target for t in small.targets]
            is_bound = any(isinstance(t, cst.Name) and t.value == name for t in targets)
            return not is_bound or bool(occurrences(small.value, name))
        if isinstance(statement, cst.If) and not occurrences(statement.test, name) and statement.orelse is not None:
            other = statement.orelse
            branches = [statement.body, other.body if isinstance(other, cst.Else) else cst.IndentedBlock([other])]
            return any(_is_read_first(branch, name) or not occurrences(branch, name) for branch in branches)
        return True
    return False


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="A loop over elements on arrays")
