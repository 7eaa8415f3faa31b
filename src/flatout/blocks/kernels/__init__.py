"""Operations with several implementations each: the reference is the specification, the others are faster and bounded by it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.blocks.kernels.matmul.linear import Linear as Linear


def __getattr__(name: str) -> Any:
    if name != "Linear":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return import_module("flatout.blocks.kernels.matmul.linear").Linear
