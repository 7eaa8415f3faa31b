"""Gradients are let go instead of filled with zeros and added to.

What        `zero_grad` of optimizers and modules sets gradients to None, whatever it is told.
Guarantee   EXACT: adding to zero is no rounding. (Parameters without a gradient are then left alone by the update.)
Refuses     Runs that do not fill gradients with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.errors import EditError
from flatout.levers.offers import as_found
from flatout.levers.syntax.calls import argument, calls_ending, is_named, with_calls, without_argument
from flatout.levers.syntax.source import code_of, parsed
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where the rule found them filled."""
    yield from as_found(LEVER.id, findings, else_because="no gradients are filled with zeros")


def apply(seams: Seams, parameters: Parameters) -> None:
    """Replace `zero_grad` where it is defined."""
    import torch
    from torch import nn

    for owner in (torch.optim.Optimizer, nn.Module):
        original = owner.zero_grad

        def zero_grad(self: object, set_to_none: bool = True, *, original: object = original) -> None:
            if not set_to_none:
                seams.note(LEVER.id)
            original(self, set_to_none=True)  # type: ignore[operator]

        seams.replace(owner, "zero_grad", zero_grad)


def edit(text: str, parameters: Parameters) -> str:
    """`zero_grad(set_to_none=False)` becomes `zero_grad()`."""
    module = parsed(text)
    told = {call: argument(call, "set_to_none", 0) for call in calls_ending(module, "zero_grad")}
    filling = {call: value for call, value in told.items() if value is not None and not is_named(value, "True")}
    if not filling:
        raise EditError("no call of zero_grad says set_to_none=False")
    unclear = next((value for value in filling.values() if not is_named(value, "False")), None)
    if unclear is not None:
        raise EditError(f"'{code_of(unclear)}' decides whether gradients are filled")
    return with_calls(module, list(filling), lambda call: without_argument(call, "set_to_none", 0)).code


LEVER = Lever(
    id="memory.gradients-to-none",
    title="Gradients set to None",
    guarantee="exact",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
