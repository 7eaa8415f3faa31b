"""Distributions do not check their arguments and values.

What        `torch.distributions.Distribution.set_default_validate_args(False)` before the script begins. A distribution that is
            made with `validate_args=True` still checks.
Guarantee   EXACT: the checks look at numbers and do not change them. (They would have stopped at the first invalid one.)
Refuses     Runs whose distributions check nothing, or hardly ever.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.imports import with_start, with_torch
from flatout.tune.rewrite.source import parsed

_SETTER = "set_default_validate_args"


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Switch the checks off by default, and back to what they were at the end."""

    def start() -> Callable[[], None]:
        from torch.distributions import Distribution

        before = Distribution._validate_args
        Distribution.set_default_validate_args(False)
        hooks.note(LEVER.id)

        def undo() -> None:
            Distribution.set_default_validate_args(before)

        return undo

    hooks.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """Write `torch.distributions.Distribution.set_default_validate_args(False)` where the script starts."""
    module = parsed(text)
    if _SETTER in text:
        raise EditError(f"the script calls {_SETTER} already")
    module, torch = with_torch(module)
    return with_start(module, f"{torch}.distributions.Distribution.{_SETTER}(False)\n").code


LEVER = lever(
    __name__,
    as_found("no distribution checks its arguments for a time that counts"),
    apply=apply,
    edit=edit,
    title="Distributions without checks",
)
