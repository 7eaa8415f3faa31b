"""One fused kernel updates all parameters, instead of a loop over them or over lists of them.

What        `fused=True` where the optimizer is made.
Guarantee   BOUNDED: the same update, with its operations in another order.
Refuses     Optimizers without a fused implementation; those that are fused already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flatout.errors import EditError
from flatout.levers.syntax.calls import TRUE, argument, calls_of, is_named, with_argument, with_calls, without_argument
from flatout.levers.syntax.source import parsed
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

_NAMES = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of torch.optim that take `fused` on CPU and CUDA (documentation of torch 2.11 to 2.13)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Fuse every optimizer that can be."""
    if not evidence.optimizers:
        return
    able = [o for o in evidence.optimizers if o.fused_supported and o.variant != "fused"]
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
    """Have it made with `fused=True`, where its parameters allow that."""
    import torch

    def fuse(kind: type, given: dict[str, Any]) -> None:
        if kind.__module__.startswith("torch.optim") and not given.get("fused") and not given.get("differentiable"):
            groups = given["params"] = list(given["params"])
            tensors = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
            if all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
                given["fused"], given["foreach"] = True, None
                seams.note(LEVER.id)

    for name in _NAMES:
        seams.at_making(getattr(torch.optim, name), fuse)


def edit(text: str, parameters: Parameters) -> str:
    """`fused=True` in the calls that make an optimizer."""
    module = parsed(text)
    made = calls_of(module, [f"torch.optim.{name}" for name in _NAMES])
    able = [c for c in made if not is_named(argument(c, "fused"), "True") and not argument(c, "differentiable")]
    if not able:
        raise EditError("no call that makes an optimizer with a fused implementation is in the file")
    return with_calls(module, able, lambda call: with_argument(without_argument(call, "foreach"), "fused", TRUE)).code


LEVER = Lever(
    id="parallelism.fused-optimizer",
    title="Fused optimizer",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
