"""Products of matrices: the vendor's library, what beats it here and there, and a table of what was measured on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.kernels.matmul.choosing import measure as measure
    from flatout.kernels.matmul.choosing import measuring as measuring
    from flatout.kernels.matmul.linear import Linear as Linear
    from flatout.kernels.matmul.packing import Packed as Packed
    from flatout.kernels.matmul.problem import plain_problem as plain_problem
    from flatout.kernels.matmul.product import choice as choice
    from flatout.kernels.matmul.product import matmul as matmul

_HOMES = {
    "Linear": "linear",
    "Packed": "packing",
    "choice": "product",
    "matmul": "product",
    "measure": "choosing",
    "measuring": "choosing",
    "plain_problem": "problem",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
