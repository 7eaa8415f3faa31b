"""Checksums of tensors: the same bits, the same number; made where the tensor lies."""

from __future__ import annotations

import zlib
from typing import Final

import torch
from torch import Tensor

from flatout.core.tensors.host_bytes import host_bytes

_CHUNK: Final = 1 << 22
"""Words that are mixed at once."""


def checksum(tensor: Tensor) -> int:
    """Checksum of the numbers' bits in order, without their shape; CRC-32 on a CPU, a weighted sum on a device. The host
    waits for it.
    """
    dense = tensor.detach()
    flat = (dense.to_dense() if dense.layout != torch.strided else dense).contiguous().reshape(-1)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    return zlib.crc32(host_bytes(data)) if flat.device.type == "cpu" else _weighted_sum(data)


def _weighted_sum(data: Tensor) -> int:
    """A checksum where bytes lie on a device: words times pseudo-random odd numbers, added up modulo 2**64.

    Changing one word always changes it; two changes cancel with a chance of about 2**-63 (multiply-shift hashing, Dietzfelbinger
    and others, 1997). The numbers are mixed from the words' places.
    """
    words = data.view(torch.int32) if data.numel() % 4 == 0 and data.storage_offset() % 4 == 0 else data
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        total += (part * (mixed_places(start, part.numel(), data.device) | 1)).sum()
    return int(total)


def mixed_places(start: int, num: int, device: torch.device | str) -> Tensor:
    """A pseudo-random int64 for each of the places `start` to `start + num - 1`: [num], the same on every device.

    Constants of splitmix64 (Steele and others, 2014).
    """
    place = torch.arange(start + 1, start + 1 + num, device=device) * -7046029254386353131
    mixed = (place ^ (place >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) * -7723592293110705685
