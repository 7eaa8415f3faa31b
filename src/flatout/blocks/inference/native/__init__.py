"""Small models as native code: `build` makes one readable C file of a module, compiles it, and gives an Engine.

>>> from flatout.blocks.inference.native import build               # doctest: +SKIP
>>> engine = build(model, (x, h), state="h")                 # doctest: +SKIP
>>> engine.step(x.numpy(), out)                              # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.blocks.inference.native.builder import build as build
    from flatout.blocks.inference.native.engine import Engine as Engine

_HOMES = {"build": "builder", "Engine": "engine"}
__all__ = ["Engine", "build"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
