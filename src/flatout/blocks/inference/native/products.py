"""Products of rows with a constant matrix, which is packed: of linear layers and of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import note_of
from flatout.blocks.inference.native.packing import (
    GROUP,
    Constants,
    packed_by_columns,
    packed_by_quads,
    packed_by_rows,
    padded_bias,
    rounded_to_int8,
    shifted_sums,
)
from flatout.blocks.inference.native.statements import MatrixProduct
from flatout.blocks.inference.native.values import LANES, View, whole


class WeightMatrix(NamedTuple):
    """A matrix (k, n) of a constant: `part` distinguishes it from others of the same source."""

    source: Node
    part: str
    matrix: Callable[[Constants], Tensor]


def multiply_by_weight(
    low: Lowering, node: Any, weight: WeightMatrix, x: View, dst: View, bias: View | None, *, is_dot: bool = False
) -> None:
    """Compute dst (rows, n) = bias + x (rows, k) times a constant, in 8 bits where that was requested for it."""
    (source, part, matrix), n, k = weight, dst.shape[1], x.shape[1]

    def packed(kind: str, make: Callable[[Tensor], Tensor]) -> View:
        buffer = low.block.add(f"{source.name} {kind} {part}", lambda c: make(matrix(c)))
        return whole(buffer, (buffer.size,))

    if source.name in low.int8:
        w = packed("int8 numbers", lambda t: packed_by_quads(rounded_to_int8(t)[0]))
        scales = packed("int8 steps", lambda t: padded_bias(rounded_to_int8(t)[1]))
        sums = packed("int8 sums", lambda t: shifted_sums(rounded_to_int8(t)[0]))
        product = MatrixProduct(dst, x, w, n, k, 0, 0, 1, bias, scales=scales, sums=sums, note=note_of(node))
    elif is_dot:
        row = -(-k // LANES) * LANES
        product = MatrixProduct(
            dst, x, packed("rows", packed_by_rows), n, k, row, 0, 1, bias, is_dot=True, note=note_of(node)
        )
    else:
        w, group = packed("columns", packed_by_columns), k * GROUP * LANES
        product = MatrixProduct(dst, x, w, n, k, 0, group, partial_sums(n, k), bias, note=note_of(node))
    low.body.statements.append(product)
    low.layers.append((source.name, product))


def partial_sums(n: int, k: int) -> int:
    """Number of partial sums of each output: fewer blocks of columns need more, so that as many additions run in parallel."""
    blocks = -(-n // LANES)
    parts = 1 if blocks >= 8 else 2 if blocks >= 3 else 4
    return parts if k >= 8 * parts else 1
