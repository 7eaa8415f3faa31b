"""Pure models of runs: how long a step takes on many devices, which layout is best, what failures cost.

>>> from flatout.scale import pareto, price
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.scale.pareto_layouts import pareto as pareto
    from flatout.scale.pricing import price as price

__all__ = ["pareto", "price"]

_HOMES = {"pareto": "flatout.scale.pareto_layouts", "price": "flatout.scale.pricing"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
