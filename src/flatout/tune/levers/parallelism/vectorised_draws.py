"""The masks of dropout are drawn by vector instructions.

What        `flatout.vectorise_draws()` before the script begins.
Guarantee   EXACT: the numbers of PyTorch's own generator, and its state after them, bit for bit; compared before it starts.
Refuses     Runs without large masks, and where PyTorch draws by MKL (CPUs by Intel): that is fast already.
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.core.errors import EditError, NativeError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.source import parsed

_BLOCK = "vectorise_draws"


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Replace PyTorch's draws, and put them back at the end."""

    def start() -> Callable[[], None]:
        from flatout.blocks.training.vectorised_draws import vectorise_draws

        try:
            undo = vectorise_draws()
        except NativeError:
            return lambda: None  # the run goes on as it is, and the report says that nothing was done
        hooks.note(LEVER.id)
        return undo

    hooks.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """Write `vectorise_draws()` where the script starts."""
    if _BLOCK in text:
        raise EditError(f"the script calls {_BLOCK} already")
    return with_start(with_import(parsed(text), "flatout", _BLOCK), f"{_BLOCK}()\n").code


LEVER = lever(
    __name__,
    as_found("no dropout draws masks on the CPU for a time that counts, or not one element after the other"),
    apply=apply,
    edit=edit,
    title="Masks of dropout drawn by vector instructions",
)
