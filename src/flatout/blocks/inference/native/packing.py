"""The block of weights: every constant that the code reads, where it lies, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from flatout.blocks.inference.native.values import LANES, Buffer, View, contiguous_strides

Constants: TypeAlias = Mapping[Node, Tensor]
Maker: TypeAlias = Callable[[Constants], Tensor]
GROUP = 8
"""Blocks that lie side by side."""
DEEP = 512
"""Inputs of a product in 8 bits whose sums fit in 32 bits: see int8.h."""


class WeightPiece(NamedTuple):
    """One tensor of the block, made of the graph's constants."""

    buffer: Buffer
    make: Maker


class WeightBlock:
    """Grows while a program is lowered. The same pieces of other constants give the block of other weights."""

    def __init__(self, constants: Constants) -> None:
        self.pieces: list[WeightPiece] = []
        self.size = 0
        self._constants = constants
        self._added: dict[str, Buffer] = {}

    def add(self, key: str, make: Maker) -> Buffer:
        """A piece, once for each key."""
        if key in self._added:
            return self._added[key]
        weights = make(self._constants)
        dtype = str(weights.dtype).removeprefix("torch.")
        buffer = Buffer(f"w{len(self.pieces)}", "weight", dtype, weights.numel(), self.size)
        self.size += buffer.num_bytes
        self.pieces.append(WeightPiece(buffer, make))
        self._added[key] = buffer
        return buffer

    def view(self, source: Node) -> View:
        """A constant as it is, without what it repeats."""
        tensor = self._constants[source]
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        small = tuple(slice(0, 1) if not stride and size > 1 else slice(None) for size, stride in sizes)
        compact = tuple(tensor[small].shape)
        buffer = self.add(f"{source.name} as it is", lambda constants: constants[source][small].contiguous())
        strides = contiguous_strides(compact)
        by = tuple(0 if n != c else stride for n, c, stride in zip(tensor.shape, compact, strides, strict=True))
        return View(buffer, 0, tuple(tensor.shape), by)

    def packed(self, constants: Constants) -> bytes:
        """The block with these constants."""
        block = bytearray(self.size)
        for buffer, make in self.pieces:
            data = make(constants).detach().numpy().tobytes()
            block[buffer.offset : buffer.offset + len(data)] = data
        return bytes(block)


def packed_by_columns(weight: Tensor) -> Tensor:
    """(k, n) in groups of 8 blocks of 16 columns, one row of a group after the other; zeros fill the last block."""
    padded = pad(weight, (0, -weight.shape[1] % LANES))
    return torch.cat([part.flatten() for part in padded.split(GROUP * LANES, 1)])


def packed_by_rows(weight: Tensor) -> Tensor:
    """(k, n) as n rows of k numbers, each padded to a multiple of 16 by zeros."""
    return pad(weight.T, (0, -weight.shape[0] % LANES)).contiguous()


def padded_bias(bias: Tensor) -> Tensor:
    """(n,) with zeros up to a multiple of 16."""
    return pad(bias.flatten(), (0, -bias.numel() % LANES))


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(k, n) as whole numbers from -127 to 127, and each column's step: its largest number over 127."""
    step = (weight.abs().amax(0) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / step).round().clamp(-127, 127).to(torch.int8), step


def packed_by_quads(weight: Tensor) -> Tensor:
    """Whole numbers (k, n) in groups of 8 blocks of 16 columns; 4 rows at a time, a column's 4 numbers side by side."""
    padded = pad(weight, (0, -weight.shape[1] % LANES, 0, -weight.shape[0] % 4))
    quads, columns = padded.shape[0] // 4, padded.shape[1]
    quadruple = padded.view(quads, 4, columns).permute(0, 2, 1).reshape(quads, columns * 4)
    return torch.cat([part.flatten() for part in quadruple.split(GROUP * LANES * 4, 1)])


def shifted_sums(weight: Tensor) -> Tensor:
    """What a row's shift by 128 adds to its sums: -128 times each column's sum over each stretch of DEEP rows (stretches, n)."""
    stretches = weight.to(torch.int32).split(DEEP)
    return torch.cat([padded_bias(-128 * part.sum(0, dtype=torch.int32)) for part in stretches])
