"""Batches are on the device before the step asks for them.

What        DataLoaders are read by a thread, which pins each batch and copies it on a stream of its own while the step before
            runs.
Guarantee   EXACT: the same batches in the same order. (Items that draw from torch's global generator on the host draw earlier
            than a model that does so too: the proof tells.)
Refuses     Runs on the CPU; batches that do not come out of a DataLoader; copies that hide behind kernels already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.cost.feeding import waiting_s
from flatout.errors import EditError
from flatout.levers.syntax.imports import call_name, with_import
from flatout.levers.syntax.source import (
    assigned_in,
    code_of,
    find,
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
    from torch.utils.data import DataLoader

_AHEAD = 2
_COUNTING = ("enumerate", "tqdm")
_SMALL_SHARE = 0.02


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where a device waits for batches that a DataLoader makes."""
    if evidence.workload.device == "cpu":
        yield Refusal(lever=LEVER.id, because="the work is done by the CPU, where batches are already")
        return
    if not any(u.fetches >= 0.5 for u in evidence.loaders):
        yield Refusal(lever=LEVER.id, because="batches do not come out of a DataLoader")
        return
    step_s, told = evidence.steps.step_s, [f.saved_s for f in findings]
    most_s = max((high for _, high in told), default=0.0) + waiting_s(evidence)
    if most_s < _SMALL_SHARE * step_s:
        yield Refusal(
            lever=LEVER.id, because=f"batches and their copies hold a step up by {most_s * 1e3:.2f} ms at most"
        )
        return
    yield Candidate(
        lever=LEVER.id,
        parameters={"ahead": _AHEAD} | _place(evidence, findings),
        saved_s=(min(0.5 * max((low for low, _ in told), default=0.0), 0.9 * step_s), min(most_s, 0.95 * step_s)),
        where=findings[0].where if findings else None,
        because=findings[0].because
        if findings
        else f"each step waits {waiting_s(evidence) * 1e3:.2f} ms for its batch",
    )


def _place(evidence: Evidence, findings: Sequence[Finding]) -> Parameters:
    """The loop to edit, where that is certain; the run can be changed without."""
    for finding in findings:
        try:
            place = place_of(evidence, finding.where, loop=True) if finding.where is not None else {}
            if place:
                edit(text_at(evidence, place), place)
                return place
        except EditError:
            continue
    return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Wrap what iterating over a DataLoader gives; batches go to the model's device once that is known."""
    import torch
    from torch.utils.data import DataLoader

    from flatout.data.prefetch import Prefetch

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
        seams.note(LEVER.id)
        return iter(Prefetch(_Source(self, original), known[0] if known else wanted, ahead=int(ahead)))  # type: ignore[arg-type]

    seams.at_first_call(meet)
    seams.replace(DataLoader, "__iter__", __iter__)


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
    """`for x in loader` becomes `for x in Prefetch(loader, device)`; the copies in the loop go."""
    module, loop = _loop(text, parameters)
    targets = _names(loop)
    moves = _moves(module, loop.body, targets)
    devices = {move.device for move in moves}
    if len(devices) != 1:
        raise EditError("the loop brings no batch to a device" if not devices else "the loop uses several devices")
    device = devices.pop()
    if names_in(cst.parse_expression(device)) & (assigned_in(loop) | targets):
        raise EditError(f"'{device}' is set in the loop")
    names = {move.name for move in moves}
    cleaned = _without(loop.body, {id(move.call): move.name for move in moves})
    again = names & assigned_in(cleaned)
    if again:
        raise EditError(f"'{min(again)}' is assigned to in the loop")
    wrapped = _wrapped(loop.iter, device)
    new = loop.with_changes(iter=wrapped, body=cleaned)
    return with_import(with_statements(module, {loop: [new]}), "flatout", "Prefetch").code


def _loop(text: str, parameters: Parameters) -> tuple[cst.Module, cst.For]:
    if "code" in parameters:
        place = find(text, parameters)
        if not isinstance(place.statement, cst.For):
            raise EditError("batches are not read by a for loop there")
        return place.module, place.statement
    module = parsed(text)
    loops = [f for f in m.findall(module, m.For()) if isinstance(f, cst.For) and _moves(module, f.body, _names(f))]
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
        given = [a for a in call.args if not (a.keyword is not None and a.keyword.value == "non_blocking")]
        if name not in targets or len(given) > 1 or any(a.keyword is not None or a.star for a in given):
            continue
        if how == "cuda" and not given:
            found.append(_Move(call, name, '"cuda"'))
        elif how == "to" and given and not call_name(module, given[0].value).startswith("torch."):
            found.append(_Move(call, name, code_of(given[0].value)))
    return found


def _without(body: cst.BaseSuite, calls: dict[int, str]) -> cst.BaseSuite:
    changed = body.visit(_Unmover(calls))
    assert isinstance(changed, cst.BaseSuite)
    if not changed.body:
        raise EditError("the loop does nothing but copy")
    return changed


class _Unmover(cst.CSTTransformer):
    def __init__(self, calls: dict[int, str]) -> None:
        super().__init__()
        self._calls = calls

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = self._calls.get(id(original_node))
        return cst.Name(name) if name else updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if len(updated_node.body) != 1 or updated_node.deep_equals(original_node):
            return updated_node
        assign = updated_node.body[0]
        if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
            return updated_node
        same = code_of(assign.targets[0].target).strip("()") == code_of(assign.value).strip("()")
        return cst.RemoveFromParent() if same else updated_node


def _wrapped(source: cst.BaseExpression, device: str) -> cst.BaseExpression:
    """The loader inside what is iterated over, in a Prefetch."""
    inner: cst.BaseExpression = source
    if isinstance(source, cst.Call) and code_of(source.func) in _COUNTING and source.args and not source.args[0].star:
        inner = source.args[0].value
    if not isinstance(inner, (cst.Name, cst.Attribute, cst.Subscript)):
        raise EditError(f"'{code_of(source)}' is not a loader by name")
    new = cst.parse_expression(f"Prefetch({code_of(inner)}, {device})")
    return new if inner is source else with_expression(source, inner, new)


LEVER = Lever(
    id="communication.prefetch-to-device",
    title="Batches copied to the device ahead of time",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
