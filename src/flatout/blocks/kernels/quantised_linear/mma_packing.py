"""Weights in the order in which the matrix units take them, so that each thread's sixteen bytes are what it multiplies.

O outputs, I inputs. A tile is 16 outputs; a step is 1 KiB of a tile's codes: 128 inputs with 4 bits, 32 with 16. 32-bit words,
[tiles, steps, 2, 32 lanes, 4 words]. Lane 4 g + t has the rows g and g + 8 of a tile. With 16 bits the two halves of a step are
these rows, and a lane's eight inputs are 8 t to 8 t + 7 of the step's 32. With 4 bits a half has 64 inputs; word 2 j + h of
a lane has the four inputs from 32 j + 8 t + 4 h on, a byte each: its lower half is of row g and its upper half of row g + 8, both
8 less than what was packed, as numbers with a sign. Scales are bfloat16 [tiles, steps, 8, 2]: of the rows g and g + 8.
The fragments are those of mma.m16n8k16 in the PTX manual, with 4 bits those of m16n8k32, with the inputs in another order, which
the sum does not see.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.quantised_linear.packing import PackedWeight
from flatout.core.errors import UsageError

ROWS: Final = 16
"""Of a tile."""
STEP: Final = {4: 128, 16: 32}
"""Inputs of a step, by bits."""
DEPTH: Final = 128
"""Inputs come in multiples of this."""
_SIGNS: Final = 0x88888888 - (1 << 32)
"""Of the eight codes of a word, which change with 8 more or less."""


class MmaPackedWeight(NamedTuple):
    """A weight [O, I] in `bits`, packed for the matrix units. `is_gated`: the first half of the outputs are gates of the second,
    and the tiles hold eight of each, so that silu(gate) * up is computed where both are."""

    words: Tensor
    scales: Tensor | None
    outputs: int
    inputs: int
    bits: int
    is_gated: bool

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + (0 if self.scales is None else self.scales.nbytes)


def why_not_packed_for_mma(weight: PackedWeight) -> str | None:
    """Why a weight cannot be packed; None when it can."""
    if weight.bits not in STEP:
        return f"it has {weight.bits} bits, and there are kernels for 4 and 16"
    if weight.bits == 4 and weight.group != DEPTH:
        return f"its groups are of {weight.group} inputs, not of {DEPTH}"
    if weight.bits == 16 and weight.codes.dtype != torch.bfloat16:
        return f"it is {weight.codes.dtype}, not bfloat16"
    depth = weight.inputs
    return f"{depth} inputs are no multiple of {DEPTH}" if depth % DEPTH or not depth else None


def pack_for_mma(weight: PackedWeight, *, is_gated: bool = False) -> MmaPackedWeight:
    """A copy of the weight in the order of the kernels; outputs are filled up with zeros to whole tiles.

    Raises UsageError for a weight that cannot be packed: see `why_not_packed_for_mma`; gates must be half of the outputs.

    >>> from flatout.blocks.kernels.quantised_linear.packing import pack_weight
    >>> pack_for_mma(pack_weight(torch.ones(24, 256), bits=4)).words.shape
    torch.Size([2, 2, 2, 32, 4])
    """
    why = why_not_packed_for_mma(weight)
    outputs = weight.codes.shape[0]
    if why is None and (outputs == 0 or (is_gated and outputs % 2)):
        why = f"it has {outputs} outputs"
    if why is not None:
        raise UsageError(f"this weight cannot be packed for the matrix units: {why}")
    codes = _rows(weight.codes, outputs, is_gated)
    inputs = weight.inputs
    if weight.bits == 16:
        return MmaPackedWeight(_packed_16_bits(codes), None, outputs, inputs, 16, is_gated)
    assert weight.scales is not None
    scales = _rows(weight.scales, outputs, is_gated).view(-1, 2, 8, inputs // DEPTH).permute(0, 3, 2, 1).contiguous()
    return MmaPackedWeight(_packed_4_bits(codes), scales, outputs, inputs, 4, is_gated)


def unpack_from_mma(weight: MmaPackedWeight) -> PackedWeight:
    """The weight as it was before `pack_for_mma`, exactly."""
    if weight.bits == 16:
        codes = weight.words.view(torch.bfloat16).view(-1, weight.inputs // 32, 2, 8, 4, 8)
        return PackedWeight(_back(codes.permute(0, 2, 3, 1, 4, 5), weight), None, 16, DEPTH)
    assert weight.scales is not None
    shifts = torch.arange(0, 32, 4, device=weight.words.device, dtype=torch.int32)
    nibbles = ((weight.words ^ _SIGNS)[..., None] >> shifts) & 15
    # [tiles, steps, half, g, t, j, h, input, row's half]: the inverse of _packed_4_bits
    shape = (-1, weight.inputs // DEPTH, 2, 8, 4, 2, 2, 4, 2)
    codes = nibbles.view(shape).permute(0, 8, 3, 1, 2, 5, 4, 6, 7).reshape(-1, weight.inputs)
    groups = codes.view(codes.shape[0], -1, 2, DEPTH // 2).to(torch.uint8)
    packed = _back(groups[:, :, 0] | groups[:, :, 1] << 4, weight)
    return PackedWeight(packed, _back(weight.scales.permute(0, 3, 2, 1), weight), 4, DEPTH)


def _places(outputs: int, is_gated: bool, device: torch.device) -> Tensor:
    """The row of the tiles in which each output is."""
    if not is_gated:
        return torch.arange(outputs, device=device)
    gates = torch.arange(outputs // 2, device=device)
    gates = gates // 8 * ROWS + gates % 8
    return torch.cat((gates, gates + 8))


def _rows(t: Tensor, outputs: int, is_gated: bool) -> Tensor:
    """Outputs in the rows of tiles, zeros in between."""
    num = -(-outputs // ROWS) * ROWS if not is_gated else -(-outputs // 2 // 8) * ROWS
    return t.new_zeros((num, t.shape[1])).index_copy_(0, _places(outputs, is_gated, t.device), t)


def _back(tiled: Tensor, weight: MmaPackedWeight) -> Tensor:
    """Rows of the tiles to outputs."""
    rows = tiled.reshape(weight.words.shape[0] * ROWS, -1)
    return rows.index_select(0, _places(weight.outputs, weight.is_gated, rows.device))


def _packed_16_bits(codes: Tensor) -> Tensor:
    # [tile, row's half, g, step, t, input] to [tile, step, row's half, g, t, input]
    lines = codes.view(-1, 2, 8, codes.shape[1] // 32, 4, 8).permute(0, 3, 1, 2, 4, 5).contiguous()
    return lines.view(torch.int32).view(lines.shape[0], lines.shape[1], 2, 32, 4)


def _packed_4_bits(packed: Tensor) -> Tensor:
    """The words of `packing`'s bytes, whose groups are stored in halves."""
    groups = packed.view(packed.shape[0], -1, DEPTH // 2)
    nibbles = torch.stack((groups & 15, groups >> 4), 2).to(torch.int32)
    # [tile, row's half, g, step, half of the step, j, t, h, input]
    lines = nibbles.view(-1, 2, 8, groups.shape[1], 2, 2, 4, 2, 4)
    # to [tile, step, half, g, t, j, h, input, row's half]
    lines = lines.permute(0, 3, 4, 2, 6, 5, 7, 8, 1).reshape(lines.shape[0], lines.shape[3], 2, 32, 4, 8)
    words = lines[..., 0]
    for i in range(1, 8):
        words = words | lines[..., i] << 4 * i
    return words ^ _SIGNS
