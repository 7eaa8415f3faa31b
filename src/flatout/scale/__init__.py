"""Pure models of runs: how long a step takes on many devices, which layout is best, what failures cost.

>>> from flatout.scale import price
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.scale.pricing import price as price

__all__ = ["price"]


def __getattr__(name: str) -> Any:
    if name != "price":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flatout.scale.pricing import price

    return price
