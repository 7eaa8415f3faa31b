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

from flatout.core.errors import LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.rewrite.calls import (
    LOADER,
    LOADER_ORDER,
    call_in,
    keyword_argument,
    true_name,
    with_argument,
    with_calls,
    with_keywords,
)
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import code_of, editable_place, names_in, nodes_of


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where large batches are copied from pageable memory."""
    if evidence.workload.device == "cpu" or not findings:
        raise LeverRefused("no large batches are copied to a device from pageable memory")
    able = [u for u in evidence.loaders if u.fetches >= 0.5 and not u.pin_memory]
    if not able:
        raise LeverRefused("what is copied from pageable memory does not come out of a DataLoader")
    step_s = evidence.steps.step_s
    yield Candidate(
        parameters=editable_place(evidence, evidence.source_of(able[0].constructed), edit),
        # The loader pins in a thread or, without workers, before the step: part of what is gained is paid there.
        saved_s=(0.0, min(0.95 * step_s, sum(high for _, high in (f.saved_s for f in findings)))),
        where=findings[0].where,
        because=findings[0].because,
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Construct loaders with `pin_memory=True`, where there is a CUDA device."""
    import torch
    from torch.utils.data import DataLoader

    if not torch.cuda.is_available():
        return

    def pin(kind: type, arguments: dict[str, Any]) -> None:
        if not arguments.get("pin_memory"):
            arguments["pin_memory"] = True
            hooks.note(LEVER.id)

    hooks.at_construction(DataLoader, pin)


def edit(text: str, parameters: Parameters) -> str:
    """Write `pin_memory=True` into the call, and `non_blocking=True` into copies of the loader's batches."""
    module, call = call_in(text, parameters, LOADER)
    name = next(
        (code_of(a.targets[0].target) for a in nodes_of(cst.Assign, module) if a.value is call and len(a.targets) == 1),
        "",
    )
    changed = with_keywords(module, call, {"pin_memory": "True"}, LOADER_ORDER)
    copies = list(_copies(changed, name)) if name else []
    return with_calls(changed, copies, lambda copy: with_argument(copy, "non_blocking", true_name())).code


def _copies(module: cst.Module, loader: str) -> Iterator[cst.Call]:
    """Calls that copy what a loop over the loader brings, `x.to(device)` and `x.cuda()`, and wait for it."""
    copy = m.Call(func=m.Attribute(value=m.Name(), attr=m.Name("to") | m.Name("cuda")))
    for loop in nodes_of(cst.For, module):
        source: cst.BaseExpression = loop.iter
        if isinstance(source, cst.Call) and source.args and code_of(source.func) in ("enumerate", "tqdm"):
            source = source.args[0].value
        for call in nodes_of(cst.Call, loop) if code_of(source) == loader else ():
            is_copy = m.matches(call, copy) and code_of(call.func).partition(".")[0] in names_in(loop.target)
            if not is_copy or len(call.args) > 1 or keyword_argument(call, "non_blocking") is not None:
                continue
            if not call.args or not (call.args[0].star or call_name(module, call.args[0].value).startswith("torch.")):
                yield call


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Batches in pinned memory")
