"""Weights in 4 and 8 bits: how numbers are rounded, and how they lie.

O outputs, I inputs, G numbers of a group, which share a scale

8 bits: codes int8 [O, I] from -127 to 127, a float32 scale for each output.
4 bits: codes from -7 to 7 kept plus 8, two a byte, uint8 [O, I / 2], a bfloat16 scale for each group of G inputs, [O, I / G].
A group's G / 2 bytes hold its first half in their low bits and its second half in their high bits, so that both come out as
neighbours.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.core.errors import UsageError

GROUP: Final = 128
"""Numbers that share a scale in 4 bits, as GPTQ and AWQ have it: 16 / 128 bits more a number."""
_LARGEST: Final = {4: 7, 8: 127}


class PackedWeight(NamedTuple):
    """A weight [O, I] in `bits`; with 16 bits `codes` is the weight itself and there are no scales."""

    codes: Tensor
    scales: Tensor | None
    bits: int
    group: int

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)


def why_not_packed(shape: torch.Size, dtype: torch.dtype, bits: int, group: int = GROUP) -> str | None:
    """Why a weight of this shape cannot be had in so many bits; None when it can.

    >>> why_not_packed(torch.Size((8, 200)), torch.float32, 4)
    '200 inputs are no multiple of the group, 128'
    """
    if bits not in _LARGEST:
        return f"there are weights of 4 and 8 bits, not of {bits}"
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return f"it is {dtype}"
    if len(shape) != 2:
        return f"it has {len(shape)} dimensions, and scales are for the rows of two"
    if bits == 4 and shape[1] % group:
        return f"{shape[1]} inputs are no multiple of the group, {group}"
    return None


def pack_weight(weight_OI: Tensor, *, bits: int, group: int = GROUP) -> PackedWeight:
    """The weight rounded to the nearest of its group's (or its row's) numbers, halves to the even one.

    What is lost is at most half a scale a number, which is the largest of the group over 14, or of the row over 254; of scales
    of 4 bits, which are bfloat16, 1/256 more. `group` must be a multiple of 16. Raises UsageError for a weight that cannot be
    packed, and for one with numbers that are not finite.

    >>> pack_weight(torch.tensor([[127.0, -1.2]]), bits=8).codes
    tensor([[127,  -1]], dtype=torch.int8)
    """
    if group < 16 or group % 16:
        raise UsageError(f"group {group} is no multiple of 16; give one, e.g. {GROUP}")
    why = why_not_packed(weight_OI.shape, weight_OI.dtype, bits, group)
    if why is not None:
        raise UsageError(f"a weight {tuple(weight_OI.shape)} cannot be packed in {bits} bits: {why}")
    weight = weight_OI.detach().float()
    if not bool(weight.isfinite().all()):
        raise UsageError("a weight has numbers that are not finite, which have no code; mend it first")
    num_out, num_in = weight.shape
    lines = weight.view(num_out, -1, group) if bits == 4 else weight.view(num_out, 1, num_in)
    # By a tensor: a GPU divides by a plain number by multiplying with its inverse, and packs the same weight to other codes.
    scales = lines.abs().amax(-1, keepdim=True) / torch.full((), float(_LARGEST[bits]), device=weight.device)
    scales = torch.where(scales == 0, 1.0, scales)
    if bits == 4:
        # A scale must not be 0 in bfloat16, whose smallest normal number is that of float32.
        scales = scales.clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    codes = (lines / scales).round_().clamp_(-_LARGEST[bits], _LARGEST[bits])
    if bits == 8:
        return PackedWeight(codes.to(torch.int8).view(num_out, num_in), scales.view(num_out), 8, group)
    nibbles = (codes + 8).to(torch.uint8)
    low, high = nibbles.chunk(2, -1)
    return PackedWeight((low | high << 4).view(num_out, num_in // 2), scales.view(num_out, -1).bfloat16(), 4, group)


def expanded(codes: Tensor, scales: Tensor | None, *, bits: int, group: int = GROUP, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] that the codes stand for: code times scale in float32 (float64 for float64), rounded once to `dtype`.

    >>> packed = pack_weight(torch.tensor([[127.0, -1.2]]), bits=8)
    >>> expanded(packed.codes, packed.scales, bits=8, dtype=torch.float32)
    tensor([[127.,  -1.]])
    """
    if scales is None:
        return codes.to(dtype)
    wide = torch.promote_types(scales.dtype, torch.float32)
    if bits == 8:
        return (codes.to(wide) * scales.to(wide)[:, None]).to(dtype)
    num_out = codes.shape[0]
    lines = codes.view(num_out, -1, group // 2)
    signed = torch.cat((lines & 15, lines >> 4), -1).to(wide) - 8
    return (signed * scales.to(wide)[..., None]).view(num_out, -1).to(dtype)
