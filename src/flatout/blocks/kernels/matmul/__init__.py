"""Products of matrices: the vendor's library, what beats it here and there, and a table of what was measured on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.blocks.kernels.matmul.dispatch import measure_matmul as measure_matmul
    from flatout.blocks.kernels.matmul.dispatch import measuring as measuring
    from flatout.blocks.kernels.matmul.linear import Linear as Linear
    from flatout.blocks.kernels.matmul.packing import Packed as Packed
    from flatout.blocks.kernels.matmul.problem import plain_problem as plain_problem
    from flatout.blocks.kernels.matmul.product import matmul as matmul
    from flatout.blocks.kernels.matmul.product import matmul_selection as matmul_selection

_HOMES = {
    "Linear": "linear",
    "Packed": "packing",
    "matmul_selection": "product",
    "matmul": "product",
    "measure_matmul": "dispatch",
    "measuring": "dispatch",
    "plain_problem": "problem",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
