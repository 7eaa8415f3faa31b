"""One way to do a product, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from flatout.kernels.matmul.packing import Packed
from flatout.records.record import Record

Loads = Literal["descriptor", "aligned", "pointer"]
Runner = Callable[[Tensor, "Tensor | Packed", "Tensor | None", "Tensor | None", "Tensor | None"], Tensor]
"""(a, b, bias, residual, scale) -> the result; a (M, K) and b (K, N) as in the problem that it was bound to."""


class Tile(Record, frozen=True, kw_only=True):
    """How a Triton kernel cuts a product up: m x n numbers of the result a program, k of the depth at a time.

    `splits` programs, a power of two, share the depth of one tile; `is_single`: they meet and add their parts up in the same
    launch, else a second one does. `is_persistent`: as many programs as multiprocessors, each of which takes one tile after
    the other; else one program a tile. `loads` through descriptors (the tensor memory accelerator) or through pointers, of
    operands as they lie ('pointer') or laid out again where their rows begin anywhere ('aligned'; descriptors need it).
    """

    m: int
    n: int
    k: int
    stages: int
    warps: int
    splits: int = 1
    group: int = 8
    loads: Loads = "descriptor"
    is_persistent: bool = False
    is_single: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", f"{self.stages} stages", f"{self.warps} warps"]
        words += [f"{self.splits} splits"] * (self.splits > 1) + ["one launch"] * self.is_single
        words += ["persistent"] * self.is_persistent
        return ", ".join([*words, *([] if self.loads == "descriptor" else [f"{self.loads} loads"])])


class Way(Record, frozen=True, kw_only=True):
    """An implementation by its name ('vendor', 'padded', 'triton', ...), and what is chosen within it.

    `unit`: sizes are rounded up to multiples of it, None for strides alone.
    """

    name: str
    tile: Tile | None = None
    unit: int | None = None

    def __str__(self) -> str:
        inner = str(self.tile) if self.tile is not None else f"to {self.unit}" if self.unit is not None else ""
        return f"{self.name}({inner})" if inner else self.name
