"""Kernels of scaled_dot_product_attention: which may compute it, set for a process, and written into a script."""

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
_SELECTS: Final = ("sdpa_kernel", "enable_flash_sdp", "enable_cudnn_sdp", "SDPBackend")


def attention_kernels_lever(
    module: str, propose: Propose, change: Callable[[], Callable[[], None]], edit: Callable[[str], str], **fields: Any
) -> Lever:
    """The lever of this module that calls `change` before the script's first line, and what that returns after the last.

    `edit` writes the same into a text; `fields` are others of `core.parts.lever`.
    """

    def apply(hooks: Hooks, parameters: Parameters) -> None:
        """Set it before the script's first line."""

        def start() -> Callable[[], None]:
            hooks.note(found.id)
            return change()

        hooks.at_start(start)

    def edited(text: str, parameters: Parameters) -> str:
        """Set it where the script starts."""
        if any(word in text for word in _SELECTS):
            raise EditError("the file chooses kernels for attention itself")
        return edit(text)

    found = lever(module, propose, apply=apply, edit=edited, **fields)
    return found


def set_order(names: Sequence[str]) -> Callable[[], None]:
    """Set the order of these members of SDPBackend; returns how to set what was there before.

    Where PyTorch prefers cuDNN, the first attention of a process on a GPU puts cuDNN first, whatever was set before it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True)
    order.__enter__()

    def undo() -> None:
        order.__exit__(None, None, None)

    return undo


def with_order(text: str, names: Sequence[str]) -> str:
    """The text that enters `sdpa_kernel` with this order where the script starts."""
    order = ", ".join(f"SDPBackend.{name}" for name in names)
    module = parsed(text)
    name = fresh_name(module, "attention_order")  # it ends when nothing refers to it
    lines = f"{name} = sdpa_kernel([{order}], set_priority=True)\n{name}.__enter__()\n"
    module = with_start(module, lines)
    for member in ("sdpa_kernel", "SDPBackend"):
        module = with_import(module, "torch.nn.attention", member)
    return module.code


def disable_cudnn() -> Callable[[], None]:
    """Have no attention computed by cuDNN; returns how to set what was there before."""
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)

    def undo() -> None:
        torch.backends.cuda.enable_cudnn_sdp(before)

    return undo


def without_cudnn(text: str) -> str:
    """The text that has no attention computed by cuDNN from where the script starts."""
    module = with_start(parsed(text), "torch.backends.cuda.enable_cudnn_sdp(False)\n")
    return with_import(module, "torch").code
