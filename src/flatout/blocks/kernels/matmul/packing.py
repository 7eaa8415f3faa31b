"""Copies of matrices whose rows begin where wide loads want them; for weights once, and again after they change.

R rows, C columns of a matrix as it is stored: C in one piece
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.launch import TritonLaunch
from flatout.blocks.kernels.matmul.problem import ROW_BYTES

Copies = Tensor | tuple[Tensor, ...]
_STRETCH: Final = 1024
"""Numbers of a row that one program copies."""


def rounded_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is no smaller than `size`.

    >>> rounded_up(3620, 8), rounded_up(4096, 8)
    (3624, 4096)
    """
    return -(-size // unit) * unit


def row_unit(dtype: torch.dtype) -> int:
    """How many numbers of a type fit 16 bytes.

    >>> row_unit(torch.bfloat16)
    8
    """
    return max(1, ROW_BYTES // dtype.itemsize)


def has_aligned_rows(stored: Tensor) -> bool:
    """Whether each row of a stored matrix begins at a multiple of 16 bytes."""
    return stored.stride(0) * stored.element_size() % ROW_BYTES == 0 and stored.data_ptr() % ROW_BYTES == 0


def repacked(stored_RC: Tensor, *, rows: int, columns: int, stride: int) -> Tensor:
    """A copy of shape (rows, columns) with `stride` numbers from row to row, filled up with zeros."""
    whole = stored_RC.new_empty((rows, stride))
    num_rows, num_columns = stored_RC.shape
    if stored_RC.is_cuda and find_spec("triton") is not None:
        launch = _repacking(rows, stride, stored_RC.dtype, stored_RC.device, num_rows, num_columns, stored_RC.stride(0))
        launch(stored_RC, whole, num_rows, num_columns, stored_RC.stride(0), rows, stride, _STRETCH)
        return whole[:, :columns]
    whole[:num_rows, :num_columns].copy_(stored_RC)
    whole[:num_rows, num_columns:].zero_()
    whole[num_rows:].zero_()
    return whole[:, :columns]


@lru_cache(maxsize=1024)
def _repacking(rows: int, stride: int, *form: object) -> TritonLaunch:
    """One for each form of matrix: what is launched without a look at the arguments must be like the first."""
    kernel = import_module("flatout.blocks.kernels.matmul.on_device.product").repack
    return TritonLaunch(kernel, (rows, -(-stride // _STRETCH), 1), num_warps=4)


class Packed:
    """A matrix that stays the same over many calls, and the copies of it that some implementations want.

    Copies are made when they are first asked for and made anew when the matrix has changed: torch counts the changes in place
    of a tensor (an optimizer's step is one). Changes that go past the count (`.data`, another process, another program on the
    device) need `forget()`, and so do changes by a captured graph. Each copy costs memory: `extra_bytes` says how much there
    is.
    """

    __slots__ = ("_copies", "_known", "_plain", "_state", "is_transposed", "source")

    def __init__(self, source: Tensor, *, is_transposed: bool = False) -> None:
        """`is_transposed`: the matrix is the source's transpose, as of the weight of a linear layer."""
        self.source, self.is_transposed = source, is_transposed
        self._copies: dict[object, Copies] = {}
        self._known: set[object] = set()
        self._state: tuple[int, int] | None = None
        self._plain = source

    @property
    def matrix(self) -> Tensor:
        """The matrix (K, N); where gradients are recorded, a view that they go through."""
        if torch.is_grad_enabled() and self.source.requires_grad:
            return self.source.T if self.is_transposed else self.source
        self._look()
        return self._plain

    def copy(self, name: object, make: Callable[[Tensor], Copies]) -> Copies:
        """The copy that `make` returns for the matrix, cached under `name` until the matrix changes."""
        self._look()
        cached = self._copies.get(name)
        if cached is None:
            with torch.no_grad():
                cached = make(self._plain)
            # A copy that a graph is being captured with holds nothing until the graph runs, and is the graph's own.
            if not (self._plain.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._copies[name] = cached
        return cached

    def is_new_to(self, name: object) -> bool:
        """Whether this is the first call with `name` since the matrix changed."""
        self._look()
        if name in self._known:
            return False
        self._known.add(name)
        return True

    def forget(self) -> None:
        """Give the copies up; they are made anew when they are next asked for."""
        self._copies.clear()
        self._known.clear()

    def _look(self) -> None:
        source = self.source
        now = (0 if source.is_inference() else source._version), source.data_ptr()
        if now != self._state:
            self.forget()
            plain = source.detach()
            self._state, self._plain = now, plain.T if self.is_transposed else plain

    @property
    def extra_bytes(self) -> int:
        """Bytes of the copies, of each storage once."""
        tensors = [t for copies in self._copies.values() for t in (copies if isinstance(copies, tuple) else (copies,))]
        plain = [t.untyped_storage() for t in tensors if not t.is_mkldnn]
        packed = sum(t.numel() * t.element_size() for t in tensors if t.is_mkldnn)  # as much, if not a little more
        return packed + sum({storage.data_ptr(): storage.nbytes() for storage in plain}.values())


Matrix = Tensor | Packed


def matrix_of(x: Matrix) -> Tensor:
    """The matrix itself, of a packed one as well."""
    return x.matrix if isinstance(x, Packed) else x


def derived_from(x: Matrix, name: object, make: Callable[[Tensor], Copies]) -> Copies:
    """The result of `make` for x: cached for a packed matrix, computed at each call for another."""
    return x.copy(name, make) if isinstance(x, Packed) else make(x)
