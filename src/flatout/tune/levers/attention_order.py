"""The order in which PyTorch looks for kernels of scaled_dot_product_attention: set for a process, and written into a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Lever, Parameters
from flatout.tune.levers.proposals import Propose
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.source import fresh_name, parsed

HOPPER_OR_LATER: Final = re.compile(r"\b(H100|H200|H800|GH200|B100|B200|GB200|B300|GB300)\b")
"""Devices on which cuDNN's kernels are faster, and the first from PyTorch 2.11 on (sdp_utils.cpp)."""


def attention_order_lever(module: str, propose: Propose, order: Sequence[str], **fields: Any) -> Lever:
    """The lever of this module that sets an order of members of SDPBackend; `fields` are others of `core.parts.lever`."""

    def apply(hooks: Hooks, parameters: Parameters) -> None:
        """Set the order before the script's first line."""

        def start() -> Callable[[], None]:
            hooks.note(found.id)
            return _set_order(order)

        hooks.at_start(start)

    def edit(text: str, parameters: Parameters) -> str:
        """Enter `sdpa_kernel` where the script starts."""
        return _with_order(text, order)

    found = lever(module, propose, apply=apply, edit=edit, **fields)
    return found


def _set_order(names: Sequence[str]) -> Callable[[], None]:
    """Set the order; returns how to set what was there before."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True)
    order.__enter__()

    def undo() -> None:
        order.__exit__(None, None, None)

    return undo


def _with_order(text: str, names: Sequence[str]) -> str:
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
