"""The order in which PyTorch looks for kernels of scaled_dot_product_attention: set for a process, and written into a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.core.errors import EditError
from flatout.core.records.lever import Hooks
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.source import fresh_name, parsed


def set_attention_order(hooks: Hooks, lever: str, names: Sequence[str]) -> None:
    """Set the order of these members of SDPBackend before the script's first line, in the name of a lever."""

    def start() -> Callable[[], None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        hooks.note(lever)
        order = sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True)
        order.__enter__()

        def undo() -> None:
            order.__exit__(None, None, None)

        return undo

    hooks.at_start(start)


def with_attention_order(text: str, names: Sequence[str]) -> str:
    """The text that enters `sdpa_kernel` with this order where the script starts.

    Raises EditError where the file selects kernels for attention itself.
    """
    if "sdpa_kernel" in text or "enable_flash_sdp" in text or "SDPBackend" in text:
        raise EditError("the file chooses kernels for attention itself")
    order = ", ".join(f"SDPBackend.{name}" for name in names)
    module = parsed(text)
    name = fresh_name(module, "attention_order")  # it ends when nothing refers to it
    lines = f"{name} = sdpa_kernel([{order}], set_priority=True)\n{name}.__enter__()\n"
    module = with_start(module, lines)
    for member in ("sdpa_kernel", "SDPBackend"):
        module = with_import(module, "torch.nn.attention", member)
    return module.code
