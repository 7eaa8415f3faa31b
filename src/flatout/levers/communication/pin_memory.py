"""Batches lie in pinned memory, from which a device copies at its full rate and while the host goes on.

What        `pin_memory=True` where a DataLoader is made. The edit has the copies in its loops made with `non_blocking=True` too.
Guarantee   EXACT: the same batches.
Refuses     Runs on the CPU; batches that do not come out of a DataLoader; loaders that pin already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.calls import LOADER, LOADER_ORDER, call_in, with_keywords
from flatout.levers.syntax.imports import call_name
from flatout.levers.syntax.source import code_of, names_in, place_of, text_at
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where large batches are copied from pageable memory."""
    if evidence.workload.device == "cpu" or not findings:
        yield Refusal(lever=LEVER.id, because="no large batches are copied to a device from pageable memory")
        return
    able = [u for u in evidence.loaders if u.fetches >= 0.5 and not u.pin_memory]
    if not able:
        yield Refusal(lever=LEVER.id, because="what is copied from pageable memory does not come out of a DataLoader")
        return
    step_s = evidence.steps.step_s
    yield Candidate(
        lever=LEVER.id,
        parameters=_place(evidence, able[0].constructed),
        # The loader pins in a thread or, without workers, before the step: part of what is gained is paid there.
        saved_s=(0.0, min(0.95 * step_s, sum(high for _, high in (f.saved_s for f in findings)))),
        where=findings[0].where,
        because=findings[0].because,
    )


def _place(evidence: Evidence, constructed: int) -> Parameters:
    where = evidence.source_of(constructed)
    if where is None:
        return {}
    try:
        place = place_of(evidence, where)
        edit(text_at(evidence, place), place)
    except EditError:
        return {}
    return place


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have loaders made so."""
    import torch
    from torch.utils.data import DataLoader

    if not torch.cuda.is_available():
        return

    def pin(kind: type, given: dict[str, Any]) -> None:
        if not given.get("pin_memory"):
            given["pin_memory"] = True
            seams.note(LEVER.id)

    seams.at_making(DataLoader, pin)


def edit(text: str, parameters: Parameters) -> str:
    """`pin_memory=True` in the call, `non_blocking=True` in copies of what loops over it give."""
    module, call = call_in(text, parameters, LOADER)
    name = next(
        (
            code_of(a.targets[0].target)
            for a in m.findall(module, m.Assign())
            if isinstance(a, cst.Assign) and a.value is call and len(a.targets) == 1
        ),
        "",
    )
    changed = with_keywords(module, call, {"pin_memory": "True"}, LOADER_ORDER)
    return changed.visit(_NonBlocking(changed, name)).code if name else changed.code


class _NonBlocking(cst.CSTTransformer):
    """Makes copies of a loop's targets asynchronous, in loops over one loader."""

    def __init__(self, module: cst.Module, loader: str) -> None:
        super().__init__()
        self._module = module
        self._loader = loader
        self._targets: list[set[str]] = []

    def visit_For(self, node: cst.For) -> None:
        source: cst.BaseExpression = node.iter
        if isinstance(source, cst.Call) and source.args and code_of(source.func) in ("enumerate", "tqdm"):
            source = source.args[0].value
        self._targets.append(names_in(node.target) if code_of(source) == self._loader else set())

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        self._targets.pop()
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        is_copy = m.matches(original_node, m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("to") | m.Name("cuda"))))
        if not is_copy or not any(code_of(original_node.func).partition(".")[0] in t for t in self._targets):
            return updated_node
        args = original_node.args
        if any(a.keyword is not None and a.keyword.value == "non_blocking" for a in args) or len(args) > 1:
            return updated_node
        if args and (args[0].star or call_name(self._module, args[0].value).startswith("torch.")):
            return updated_node
        given = ", ".join(
            [*(code_of(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in args), "non_blocking=True"]
        )
        new = cst.parse_expression(f"{code_of(original_node.func)}({given})")
        assert isinstance(new, cst.Call)
        return new


LEVER = Lever(
    id="communication.pin-memory",
    title="Batches in pinned memory",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
