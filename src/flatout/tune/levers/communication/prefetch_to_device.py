"""Batches are on the device before the step asks for them.

What        DataLoaders are read by a thread, which pins each batch and copies it on a stream of its own while the step before
            runs.
Guarantee   EXACT: the same batches in the same order. (Items that draw from torch's global generator on the host draw earlier
            than a model that does so too: the proof tells.)
Refuses     Runs on the CPU; batches that do not come out of a DataLoader; copies that hide behind kernels already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.feeding import waiting_s
from flatout.tune.rewrite.enclosing_blocks import assignment
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.source import (
    Change,
    assigned_in,
    code_of,
    editable_place,
    find,
    names_in,
    nodes_of,
    parsed,
    with_changes,
    with_expression,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

_AHEAD = 2
_COUNTING = ("enumerate", "tqdm")
_SMALL_SHARE = 0.02


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where a device waits for batches of a DataLoader."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("the work is done by the CPU, where batches are already")
    if not any(u.fetches >= 0.5 for u in evidence.loaders):
        raise LeverRefused("batches do not come out of a DataLoader")
    step_s, savings = evidence.steps.step_s, [f.saved_s for f in findings]
    most_s = max((high for _, high in savings), default=0.0) + waiting_s(evidence)
    if most_s < _SMALL_SHARE * step_s:
        raise LeverRefused(f"batches and their copies hold a step up by {most_s * 1e3:.2f} ms at most")
    places = (editable_place(evidence, finding.where, edit, loop=True) for finding in findings)
    yield Candidate(
        parameters={"ahead": _AHEAD} | next(filter(None, places), {}),
        saved_s=(min(0.5 * max((low for low, _ in savings), default=0.0), 0.9 * step_s), min(most_s, 0.95 * step_s)),
        where=findings[0].where if findings else None,
        because=findings[0].because
        if findings
        else f"each step waits {waiting_s(evidence) * 1e3:.2f} ms for its batch",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Wrap the iterators of DataLoaders; batches are copied to the model's device once that is known."""
    import torch
    from torch.utils.data import DataLoader

    from flatout.blocks.data.prefetch import Prefetch

    wanted = torch.device(str(parameters.get("device", "cuda")))
    if wanted.type == "cuda" and not torch.cuda.is_available():
        return
    ahead, original, thread = parameters.get("ahead", _AHEAD), DataLoader.__iter__, get_ident()
    known: list[torch.device] = []

    def meet(module: nn.Module) -> None:
        device = next(module.parameters()).device
        if device.type == wanted.type and not known:
            known.append(device)

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        if get_ident() != thread:
            return original(self)
        hooks.note(LEVER.id)
        return iter(Prefetch(_Source(self, original), known[0] if known else wanted, ahead=int(ahead)))  # type: ignore[arg-type]

    hooks.at_first_call(meet)
    hooks.replace(DataLoader, "__iter__", __iter__)


class _Source:
    """A loader, iterated over as before."""

    def __init__(self, loader: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._loader = loader
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._loader)


class _Move(NamedTuple):
    """A call that brings a batch's tensor to a device."""

    call: cst.Call
    name: str
    device: str


def edit(text: str, parameters: Parameters) -> str:
    """Write `for x in Prefetch(loader, device)` for `for x in loader`, without the copies in the loop."""
    module, loop = _loop(text, parameters)
    targets = _names(loop)
    moves = _moves(module, loop.body, targets)
    devices = {move.device for move in moves}
    if len(devices) != 1:
        raise EditError("the loop brings no batch to a device" if not devices else "the loop uses several devices")
    device = devices.pop()
    if names_in(cst.parse_expression(device)) & (assigned_in(loop) | targets):
        raise EditError(f"'{device}' is set in the loop")
    calls: dict[cst.CSTNode, str] = {move.call: move.name for move in moves}
    cleaned = _without(loop.body, calls)
    again = _assigned_before(loop.body, calls)
    if again:
        raise EditError(f"'{min(again)}' is assigned to in the loop before it comes to the device")
    wrapped = _wrapped(loop.iter, device)
    new = loop.with_changes(iter=wrapped, body=cleaned)
    return with_import(with_changes(module, {loop: [new]}), "flatout", "Prefetch").code


def _loop(text: str, parameters: Parameters) -> tuple[cst.Module, cst.For]:
    if "code" in parameters:
        place = find(text, parameters)
        if not isinstance(place.statement, cst.For):
            raise EditError("batches are not read by a for loop there")
        return place.module, place.statement
    module = parsed(text)
    loops = [f for f in nodes_of(cst.For, module) if _moves(module, f.body, _names(f))]
    if len(loops) != 1:
        raise EditError(f"{len(loops) or 'no'} loops bring batches to a device")
    return module, loops[0]


def _names(loop: cst.For) -> set[str]:
    """The names of a batch's parts."""
    target: cst.BaseExpression = loop.target
    is_counted = isinstance(loop.iter, cst.Call) and code_of(loop.iter.func) == "enumerate"
    if is_counted and isinstance(target, cst.Tuple) and len(target.elements) == 2:
        target = target.elements[1].value
    return names_in(target)


def _moves(module: cst.Module, body: cst.CSTNode, targets: set[str]) -> list[_Move]:
    found = []
    for call in m.findall(body, m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("to") | m.Name("cuda")))):
        assert isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)
        name, how = code_of(call.func.value), call.func.attr.value
        arguments = [a for a in call.args if not (a.keyword is not None and a.keyword.value == "non_blocking")]
        if name not in targets or len(arguments) > 1 or any(a.keyword is not None or a.star for a in arguments):
            continue
        if how == "cuda" and not arguments:
            found.append(_Move(call, name, '"cuda"'))
        elif how == "to" and arguments and not call_name(module, arguments[0].value).startswith("torch."):
            found.append(_Move(call, name, code_of(arguments[0].value)))
    return found


def _without(body: cst.BaseSuite, calls: Mapping[cst.CSTNode, str]) -> cst.BaseSuite:
    """The loop's body with names in place of these calls, without the assignments of a name to itself that this leaves."""
    changes: dict[cst.CSTNode, Change] = {call: cst.Name(name) for call, name in calls.items()}
    lines = [s for s in nodes_of(cst.SimpleStatementLine, body) if any(c in calls for c in nodes_of(cst.Call, s))]
    changed = with_changes(body, changes | dict.fromkeys(lines, _unless_same))
    if not changed.body:
        raise EditError("the loop does nothing but copy")
    return changed


def _assigned_before(body: cst.BaseSuite, calls: Mapping[cst.CSTNode, str]) -> set[str]:
    """Names that become something else in the loop before, or in a block where, the last of these calls moves them."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for number, statement in enumerate(body.body):
        moved = {calls[call] for call in nodes_of(cst.Call, statement) if call in calls}
        last |= dict.fromkeys(moved, number)
        is_line = isinstance(statement, cst.SimpleStatementLine)
        is_move = False
        if moved and isinstance(statement, cst.SimpleStatementLine):
            is_move = not _unless_same(with_changes(statement, {call: cst.Name(name) for call, name in calls.items()}))
        for name in () if is_move else assigned_in(statement):
            first.setdefault(name, number + 0.5 * is_line)  # a line is computed before it is assigned
    return {name for name, number in last.items() if first.get(name, math.inf) <= number}


def _unless_same(line: cst.SimpleStatementLine) -> cst.CSTNode | Sequence[cst.CSTNode]:
    target, value = (code_of(part).strip("()") for part in assignment(line) or (cst.Name("_"), cst.Ellipsis()))
    return [] if target == value else line


def _wrapped(source: cst.BaseExpression, device: str) -> cst.BaseExpression:
    """The loader inside what is iterated over, in a Prefetch."""
    inner: cst.BaseExpression = source
    if isinstance(source, cst.Call) and code_of(source.func) in _COUNTING and source.args and not source.args[0].star:
        inner = source.args[0].value
    if not isinstance(inner, (cst.Name, cst.Attribute, cst.Subscript)):
        raise EditError(f"'{code_of(source)}' is not a loader by name")
    new = cst.parse_expression(f"Prefetch({code_of(inner)}, {device})")
    return new if inner is source else with_expression(source, inner, new)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Batches copied to the device ahead of time")
