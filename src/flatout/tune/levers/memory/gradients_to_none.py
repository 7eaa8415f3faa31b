"""Gradients are let go instead of filled with zeros and added to.

What        `zero_grad` of optimizers and modules sets gradients to None, whatever it is told.
Guarantee   EXACT: adding to zero is no rounding. (Parameters without a gradient are then left alone by the update.)
Refuses     Runs that do not fill gradients with zeros.
"""

from __future__ import annotations

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.calls import argument, calls_ending, is_named, with_calls, without_argument
from flatout.tune.rewrite.source import code_of, parsed


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Replace `zero_grad` of optimizers and modules where it is defined."""
    import torch
    from torch import nn

    for owner in (torch.optim.Optimizer, nn.Module):
        original = owner.zero_grad

        def zero_grad(self: object, set_to_none: bool = True, *, original: object = original) -> None:
            if not set_to_none:
                hooks.note(LEVER.id)
            original(self, set_to_none=True)  # type: ignore[operator]

        hooks.replace(owner, "zero_grad", zero_grad)


def edit(text: str, parameters: Parameters) -> str:
    """Write `zero_grad()` for `zero_grad(set_to_none=False)`."""
    module = parsed(text)
    modes = {call: argument(call, "set_to_none", 0) for call in calls_ending(module, "zero_grad")}
    filling = {call: value for call, value in modes.items() if value is not None and not is_named(value, "True")}
    if not filling:
        raise EditError("no call of zero_grad says set_to_none=False")
    unclear = next((value for value in filling.values() if not is_named(value, "False")), None)
    if unclear is not None:
        raise EditError(f"'{code_of(unclear)}' decides whether gradients are filled")
    return with_calls(module, list(filling), lambda call: without_argument(call, "set_to_none", 0)).code


LEVER = lever(
    __name__,
    as_found("no gradients are filled with zeros"),
    apply=apply,
    edit=edit,
    title="Gradients set to None",
)
