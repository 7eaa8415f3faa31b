"""Numbers too small for the normal format count as zero.

What        `torch.set_flush_denormal(True)` before the script begins.
Guarantee   BOUNDED: numbers below 1.2e-38 in float32 become 0.
Refuses     Runs without such numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.calls import calls_to
from flatout.tune.rewrite.imports import with_start, with_torch
from flatout.tune.rewrite.source import parsed


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Flush denormals in the thread that runs the script, and those that it starts."""
    import torch

    def start() -> Callable[[], None]:
        if torch.set_flush_denormal(True):
            hooks.note(LEVER.id)

        def undo() -> None:
            torch.set_flush_denormal(False)

        return undo

    hooks.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """Write `torch.set_flush_denormal(True)` where the script starts."""
    module = parsed(text)
    if calls_to(module, ("torch.set_flush_denormal",)):
        raise EditError("the script calls torch.set_flush_denormal already")
    module, torch = with_torch(module)
    return with_start(module, f"{torch}.set_flush_denormal(True)\n").code


LEVER = lever(
    __name__,
    as_found("no numbers below the normal range were observed"),
    apply=apply,
    edit=edit,
    title="Denormal numbers flushed to zero",
)
