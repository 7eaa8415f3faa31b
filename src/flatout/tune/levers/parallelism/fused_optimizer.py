"""One fused kernel updates all parameters, instead of a loop over them or over lists of them.

What        `fused=True` where the optimizer is made; `foreach=True` (each operation once for all parameters) for those of torch's
            optimizers that have no fused implementation.
Guarantee   BOUNDED: the same update, with its operations in another order.
Refuses     Optimizers that are not torch's own; those that are fused, or go over lists and cannot be fused, already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, OptimizerUse
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.tune.levers.parameter_groups import listed_groups, optimized_tensors
from flatout.tune.rewrite.calls import (
    argument,
    calls_to,
    is_named,
    true_name,
    with_argument,
    with_calls,
    without_argument,
)
from flatout.tune.rewrite.source import parsed, readable_place, script_of

_NAMES = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of torch.optim that take `fused` on CPU and CUDA (documentation of torch 2.11 to 2.13)."""
_OF_LISTS = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Those that take `foreach` alone (the same). On a CPU they go over the parameters one by one unless told."""
_SAVED_BY_LISTS = 0.4


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose to fuse every optimizer that can be fused."""
    if not evidence.optimizers:
        return
    able = [o for o in evidence.optimizers if o.fused_supported and o.variant != "fused"]
    listed = [o for o in evidence.optimizers if o.name in _OF_LISTS and o.variant == "for-loop"]
    if listed and not able:
        step_s = sum(o.calls * o.step_s for o in listed)
        yield Candidate(
            parameters=_files(evidence, listed),
            saved_s=(0.0, _SAVED_BY_LISTS * step_s),
            where=evidence.source_of(listed[0].constructed),
            because=f"{', '.join(o.name for o in listed)} takes {step_s * 1e3:.2f} ms a step, one parameter after the other",
        )
        return
    if not able:
        why = ", ".join(f"{o.name} is {o.variant}" for o in evidence.optimizers)
        raise LeverRefused(f"no optimizer that has a fused implementation and does not use it ({why})")
    step_s = sum(o.calls * o.step_s for o in able)
    savings = [f.saved_s for f in findings]
    saved_s = (sum(low for low, _ in savings), sum(high for _, high in savings)) if savings else (0.0, 0.6 * step_s)
    yield Candidate(
        parameters=_files(evidence, able),
        saved_s=saved_s,
        where=evidence.source_of(able[0].constructed),
        because=f"{', '.join(o.name for o in able)} takes {step_s * 1e3:.2f} ms a step, {able[0].variant}",
    )


def _files(evidence: Evidence, optimizers: Sequence[OptimizerUse]) -> Parameters:
    """The files that construct them, where that is not the script alone."""
    places = [readable_place(evidence, evidence.source_of(one.constructed)) for one in optimizers]
    files = tuple(dict.fromkeys(string(place, "file") for place in places if place))
    return {"files": files} if files and files != (script_of(evidence),) else {}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Construct optimizers with `fused=True`, where their parameters allow that, or with `foreach=True`."""
    import torch

    def fuse(kind: type, arguments: dict[str, Any]) -> None:
        if (
            kind.__module__.startswith("torch.optim")
            and not arguments.get("fused")
            and not arguments.get("differentiable")
        ):
            tensors = optimized_tensors(listed_groups(arguments))
            if all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
                arguments["fused"], arguments["foreach"] = True, None
                hooks.note(LEVER.id)

    def go_over_lists(kind: type, arguments: dict[str, Any]) -> None:
        is_free = arguments.get("foreach") is not True and not arguments.get("differentiable")
        if kind.__module__.startswith("torch.optim") and is_free:
            arguments["foreach"] = True
            hooks.note(LEVER.id)

    for name in _NAMES:
        hooks.at_construction(getattr(torch.optim, name), fuse)
    for name in _OF_LISTS:
        hooks.at_construction(getattr(torch.optim, name), go_over_lists)


def edit(text: str, parameters: Parameters) -> str:
    """Write `fused=True`, or `foreach=True`, into the calls that construct an optimizer."""
    module = parsed(text)
    slow = [c for c in _optimizers(module, _OF_LISTS) if not is_named(argument(c, "foreach"), "True")]
    module = with_calls(module, slow, lambda call: with_argument(call, "foreach", true_name()))
    able = [c for c in _optimizers(module, _NAMES) if not is_named(argument(c, "fused"), "True")]
    if not able and not slow:
        raise EditError("no call that makes an optimizer with a fused implementation is in the file")
    return with_calls(
        module, able, lambda call: with_argument(without_argument(call, "foreach"), "fused", true_name())
    ).code


def _optimizers(module: cst.Module, names: Sequence[str]) -> list[cst.Call]:
    constructors = calls_to(module, [f"torch.optim.{name}" for name in names])
    return [c for c in constructors if not argument(c, "differentiable")]


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Fused optimizer")
