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

from flatout.errors import EditError
from flatout.levers.syntax.calls import TRUE, argument, calls_of, is_named, with_argument, with_calls, without_argument
from flatout.levers.syntax.source import parsed
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

_NAMES = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of torch.optim that take `fused` on CPU and CUDA (documentation of torch 2.11 to 2.13)."""
_OF_LISTS = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Those that take `foreach` alone (the same). On a CPU they go over the parameters one by one unless told."""
_SAVED_BY_LISTS = 0.4


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Fuse every optimizer that can be."""
    if not evidence.optimizers:
        return
    able = [o for o in evidence.optimizers if o.fused_supported and o.variant != "fused"]
    listed = [o for o in evidence.optimizers if o.name in _OF_LISTS and o.variant == "for-loop"]
    if listed and not able:
        step_s = sum(o.step_s for o in listed)
        yield Candidate(
            lever=LEVER.id,
            saved_s=(0.0, _SAVED_BY_LISTS * step_s),
            where=evidence.source_of(listed[0].constructed),
            because=f"{', '.join(o.name for o in listed)} takes {step_s * 1e3:.2f} ms a step, one parameter after the other",
        )
        return
    if not able:
        why = ", ".join(f"{o.name} is {o.variant}" for o in evidence.optimizers)
        yield Refusal(
            lever=LEVER.id, because=f"no optimizer that has a fused implementation and does not use it ({why})"
        )
        return
    step_s = sum(o.step_s for o in able)
    told = [f.saved_s for f in findings]
    saved_s = (sum(low for low, _ in told), sum(high for _, high in told)) if told else (0.0, 0.6 * step_s)
    yield Candidate(
        lever=LEVER.id,
        saved_s=saved_s,
        where=evidence.source_of(able[0].constructed),
        because=f"{', '.join(o.name for o in able)} takes {step_s * 1e3:.2f} ms a step, {able[0].variant}",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have it made with `fused=True`, where its parameters allow that, or with `foreach=True`."""
    import torch

    def fuse(kind: type, given: dict[str, Any]) -> None:
        if kind.__module__.startswith("torch.optim") and not given.get("fused") and not given.get("differentiable"):
            groups = given["params"] = list(given["params"])
            tensors = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
            if all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
                given["fused"], given["foreach"] = True, None
                seams.note(LEVER.id)

    def go_over_lists(kind: type, given: dict[str, Any]) -> None:
        is_free = given.get("foreach") is not True and not given.get("differentiable")
        if kind.__module__.startswith("torch.optim") and is_free:
            given["foreach"] = True
            seams.note(LEVER.id)

    for name in _NAMES:
        seams.at_making(getattr(torch.optim, name), fuse)
    for name in _OF_LISTS:
        seams.at_making(getattr(torch.optim, name), go_over_lists)


def edit(text: str, parameters: Parameters) -> str:
    """`fused=True`, or `foreach=True`, in the calls that make an optimizer."""
    module = parsed(text)
    slow = [c for c in _made(module, _OF_LISTS) if not is_named(argument(c, "foreach"), "True")]
    module = with_calls(module, slow, lambda call: with_argument(call, "foreach", TRUE))
    able = [c for c in _made(module, _NAMES) if not is_named(argument(c, "fused"), "True")]
    if not able and not slow:
        raise EditError("no call that makes an optimizer with a fused implementation is in the file")
    return with_calls(module, able, lambda call: with_argument(without_argument(call, "foreach"), "fused", TRUE)).code


def _made(module: cst.Module, names: Sequence[str]) -> list[cst.Call]:
    made = calls_of(module, [f"torch.optim.{name}" for name in names])
    return [c for c in made if not argument(c, "differentiable")]


LEVER = Lever(
    id="parallelism.fused-optimizer",
    title="Fused optimizer",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
