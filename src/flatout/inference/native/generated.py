"""What becomes of a model: C text, packed weights, and what they are of."""

from __future__ import annotations

from typing import NamedTuple

from flatout.records.native import NativeLayer, Port


class Generated(NamedTuple):
    """`source` is model.c and compiles alone; `weights` is the block that its functions read, at a multiple of 64 bytes."""

    name: str
    source: str
    header: str
    weights: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: tuple[Port, ...]
    layers: tuple[NativeLayer, ...]
