"""Micro-batches whose gradients are added up go through the model several at a time.

What        The loop over micro-batches collects `join` of them, and its forward and backward run on those put one behind another
            (`torch.cat`): the same samples, and the same update. Weights are cast, and gradients added up, less often, and
            kernels are larger. The loss that is read after the loop is the mean of the last `join`, and not that of the last one.
Guarantee   BOUNDED: the same mean of the losses and its gradient, summed in another order. Losses that are no mean over as many
            samples in each micro-batch, and models that look at the whole batch (batch norm), give others: the proof refuses it.
Refuses     Loops over micro-batches that are not written out (`for _ in range(n)` around the backward); results of the forward,
            other than the loss, that are read after it; micro-batches that are made of what the forward computes.
Costs       Memory: activations of `join` micro-batches at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters, integer, string
from flatout.machine.cost.accounting import main_model
from flatout.tune.rewrite.enclosing_blocks import (
    Parents,
    assigns_names,
    calls_backward,
    levels,
    occurrences,
    only_small,
    parents_of,
    read_elsewhere,
)
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    bare_names,
    code_of,
    expression,
    find,
    first_line,
    fresh_name,
    names_in,
    place_parameters,
    statements,
    text_at,
    with_changes,
    with_names,
)

_MOST_JOINED: Final = 16
_NUM_TRIED: Final = 3
_SAVED: Final = 0.3
"""Of a step, at most: a GPT-2 small of 4 x 12 x 1,024 tokens, in bfloat16 and compiled, took 0.91 of its time as one batch of 48
(H200, bench/results/2026-11-26-h200); micro-batches that do not fill a machine gain more."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose all micro-batches of an update at once, then fewer, where a loop over them is written out."""
    model = main_model(evidence)
    lines = [s for s in map(evidence.source_of, evidence.backward_sources) if s is not None]
    if evidence.steps.kind != "training" or model is None or len(lines) != 1:
        raise LeverRefused("no loop over micro-batches with one backward was found")
    number = round(evidence.models[model].calls)
    updates = {loop for o in evidence.optimizers if (s := evidence.source_of(o.source)) for loop in s.loops}
    if number < 2 or not lines[0].loops or lines[0].loops[-1] in updates:
        raise LeverRefused("gradients of several micro-batches are not added up in a loop of their own")
    try:
        call = evidence.source_of(evidence.models[model].source)
        place = place_parameters(evidence, lines[0])
        place |= {"model": place_parameters(evidence, call)["code"]} if call is not None else {}
        edit(text_at(evidence, place), place | {"join": number})
    except EditError as e:
        raise LeverRefused(str(e)) from e
    several = [n for n in range(min(number, _MOST_JOINED), 1, -1) if number % n == 0]
    for join in several[:_NUM_TRIED]:
        yield Candidate(
            parameters=place | {"join": join},
            saved_s=(0.0, _SAVED * (1 - 1 / join) * evidence.steps.whole_s),
            where=lines[0],
            because=f"{number} micro-batches go through {evidence.models[model].name} one after the other for each update",
        )


class _MicroBatches(NamedTuple):
    """What a loop over micro-batches does with each, in the order of the new loop."""

    others: tuple[cst.BaseStatement, ...]
    """What is about the count alone: whether gradients are synchronised, for example."""
    bring: tuple[cst.BaseStatement, ...]
    compute: tuple[cst.BaseStatement, ...]
    sums: tuple[cst.BaseStatement, ...]
    """`total += loss.item()` and the like."""
    data: tuple[str, ...]
    loss: str
    is_brought_first: bool
    """Whether a micro-batch is brought ahead of its forward, and not the next one after it."""


def edit(text: str, parameters: Parameters) -> str:
    """Have the loop around the backward take several micro-batches at a time.

    Raises EditError where that is not certain.
    """
    place, join = find(text, parameters), integer(parameters, "join")
    module, parents = place.module, parents_of(place.module)
    loop = next(iter(levels(parents, place.statement))).owner
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name) or loop.orelse is not None:
        raise EditError("the backward is not directly in a loop that counts micro-batches")
    if not m.matches(loop.iter, m.Call(func=m.Name("range"), args=[m.Arg()])):
        raise EditError(f"the loop goes over '{code_of(loop.iter)}', and not over a number of micro-batches")
    number = code_of(cst.ensure_type(loop.iter, cst.Call).args[0].value)
    found = _micro_batches(place, loop, string(parameters, "model"))
    collected, counter = fresh_name(module, "micro_batches"), fresh_name(module, "part")
    joined = {name: fresh_name(module, f"{name}_joined") for name in found.data}
    comma = "," if len(found.data) == 1 else ""
    [start, collect, append, put] = statements(
        f"{collected} = []\nfor {counter} in range({join}):\n    pass\n{collected}.append(({', '.join(found.data)}{comma}))\n"
        f"{', '.join(joined.values())}{comma} = (torch.cat(tensors) for tensors in zip(*{collected}, strict=True))\n"
    )
    inner = [*found.bring, append] if found.is_brought_first else [append, *found.bring]
    collect = cst.ensure_type(collect, cst.For).with_changes(body=cst.IndentedBlock(inner))
    compute = [with_names(one, joined) for one in found.compute]
    scaled = [_scaled(one, found.loss, join, parents) for one in (place.statement, *found.sums)]
    over = expression(f"range({join - 1}, {number}, {join})")
    block = cst.IndentedBlock([*found.others, start, collect, put, *compute, *scaled])
    longer = loop.with_changes(iter=over, body=block, leading_lines=())
    why = f"{join} micro-batches go through the model at a time, and their number is no multiple of that"
    [check] = statements(f'if {number} % {join}:\n    raise ValueError("{why}")\n')
    check = cst.ensure_type(check, cst.If).with_changes(leading_lines=loop.leading_lines)
    return with_import(with_changes(module, {loop: [check, longer]}), "torch").code


def _micro_batches(place: SourcePlace, loop: cst.For, model: str) -> _MicroBatches:
    """The statements of the loop, sorted. Raises EditError where it cannot be told what one is about."""
    backward = only_small(place.statement)
    if backward is None or not calls_backward(place.statement):
        raise EditError(f"'{first_line(place.module, place.statement)}' is no plain call of backward()")
    block = [one for one in loop.body.body if isinstance(one, cst.BaseStatement)]
    at = next(i for i, one in enumerate(block) if one is place.statement)
    start = next((i for i, one in enumerate(block[:at]) if _holds(place, one, model)), None)
    if start is None:
        raise EditError("the model is not called in the same loop, ahead of the backward")
    compute, own = [block[start]], assigned_in(block[start])
    for one in block[start + 1 : at]:
        if assigns_names(one) and names_in(one) & own and not _is_sum(one):
            compute.append(one)
            own |= assigned_in(one)
    losses = sorted(names_in(backward) & own)
    if len(losses) != 1:
        raise EditError("the loss is not one name that is assigned ahead of the backward")
    rest = [one for one in block if one is not place.statement and one not in compute]
    sums = [one for one in rest if _is_sum(one) and names_in(one) & own == {losses[0]}]
    rest = [one for one in rest if one not in sums]
    wanted = names_in(compute)
    bring: list[cst.BaseStatement] = []
    for one in reversed(rest):
        if assigns_names(one) and assigned_in(one) & wanted:
            bring.insert(0, one)
            wanted |= names_in(one)
    others = [one for one in rest if one not in bring]
    data = tuple(dict.fromkeys(n.value for n in bare_names(compute) if n.value in assigned_in(bring) - own))
    if not data:
        raise EditError("nothing in the loop brings a micro-batch")
    _check(place, loop, _Parts(compute, bring, others, own), losses[0])
    ahead = [block.index(one) < start for one in bring]
    if any(ahead) and not all(ahead):
        raise EditError("a micro-batch is brought partly ahead of the forward, and partly after it")
    first = tuple(one.with_changes(leading_lines=()) for one in bring)
    return _MicroBatches(tuple(others), first, tuple(compute), tuple(sums), data, losses[0], all(ahead))


class _Parts(NamedTuple):
    compute: list[cst.BaseStatement]
    bring: list[cst.BaseStatement]
    others: list[cst.BaseStatement]
    own: set[str]
    """Names that the forward assigns."""


def _check(place: SourcePlace, loop: cst.For, parts: _Parts, loss: str) -> None:
    """Raises EditError where the loop does what several micro-batches at a time would change."""
    for one in parts.others:
        if m.findall(one, m.AugAssign() | m.Call()) or names_in(one) & (parts.own | assigned_in(parts.bring)):
            raise EditError(f"'{first_line(place.module, one)}' is done for each micro-batch")
    if bad := sorted(names_in(parts.bring) & parts.own):
        raise EditError(f"'{bad[0]}', which the forward computes, is read by what brings a micro-batch")
    if names_in(loop.target) & names_in([*parts.compute, *parts.bring]):
        raise EditError(
            f"'{code_of(loop.target)}', the loop's counter, is read by what brings or computes a micro-batch"
        )
    if bad := sorted((parts.own - {loss}) & read_elsewhere(place.module, place.function, loop)):
        raise EditError(f"'{bad[0]}', which the forward computes, is read after the loop")


def _holds(place: SourcePlace, statement: cst.BaseStatement, code: str) -> bool:
    """Whether a statement, or one in its block, begins with this line."""
    inside = m.findall(statement, m.SimpleStatementLine())
    return any(first_line(place.module, one) == code for one in (statement, *inside))


def _is_sum(statement: cst.BaseStatement) -> bool:
    """Whether it is `total += loss`, or of the loss read or detached."""
    small = only_small(statement)
    if not isinstance(small, cst.AugAssign) or not isinstance(small.operator, cst.AddAssign):
        return False
    value = small.value
    while m.matches(value, m.Call(func=m.Attribute(attr=m.Name("item") | m.Name("detach")), args=[])):
        value = cst.ensure_type(cst.ensure_type(value, cst.Call).func, cst.Attribute).value
    return isinstance(value, cst.Name)


def _scaled(statement: cst.BaseStatement, loss: str, join: int, parents: Parents) -> cst.BaseStatement:
    """A statement with the loss times the number of micro-batches that it is the mean of."""
    changes: dict[cst.CSTNode, Change] = {}
    for name in occurrences(statement, loss):
        is_alone = isinstance(parents.get(name), (cst.Arg, cst.AugAssign))
        changes[name] = expression(f"{loss} * {join}" if is_alone else f"({loss} * {join})")
    return with_changes(statement, changes)


LEVER = lever(
    __name__,
    propose,
    edit=edit,
    num_losses=lambda parameters: integer(parameters, "join"),
    title="Micro-batches as one",
)
