"""A variant of an implementation: its name and parameters, and the type of what runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from flatout.blocks.kernels.matmul.packing import Matrix
from flatout.blocks.kernels.opaque import Side
from flatout.core.records.record import Record

Loads = Literal["descriptor", "aligned", "pointer"]
Runner = Callable[[Tensor, Matrix, Side, Side, Side], Tensor]
"""(a, b, bias, residual, scale) -> the result; a (M, K) and b (K, N) as in the problem that it was bound to."""


class MatmulInputs(NamedTuple):
    """The tensors that a runner takes."""

    a: Tensor
    b: Matrix
    bias: Side = None
    residual: Side = None
    scale: Side = None


class Tile(Record, frozen=True, kw_only=True):
    """How a Triton kernel tiles a product: m x n numbers of the result a program, k of the depth at a time.

    `splits` programs, a power of two, share the depth of one tile; `is_single`: they meet and add their parts up in the same
    launch, else a second one does. `is_persistent`: as many programs as multiprocessors, each of which takes one tile after
    the other; else one program a tile. `loads` through descriptors (the tensor memory accelerator) or through pointers, of
    operands as they are ('pointer') or copied where their rows are not aligned to 16 bytes ('aligned'; descriptors need it).
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


class Variant(Record, frozen=True, kw_only=True):
    """An implementation by its name ('vendor', 'padded', 'triton', ...), with its parameters.

    `unit`: sizes are rounded up to multiples of it, None for strides alone.
    """

    name: str
    tile: Tile | None = None
    unit: int | None = None

    def __str__(self) -> str:
        inner = str(self.tile) if self.tile is not None else f"to {self.unit}" if self.unit is not None else ""
        return f"{self.name}({inner})" if inner else self.name
