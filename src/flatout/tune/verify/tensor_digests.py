"""Digests of tensors: small stand-ins that show whether two tensors have the same bits, and how far from each other they are."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.core.tensors.checksum import checksum, mixed_places

NUM_BUCKETS: Final = 4096
"""Numbers of a sketch. The estimate of a squared distance then has a relative standard deviation of sqrt(2 / 4096) = 2.2 %
(Charikar, Chen, Farach-Colton: Finding frequent items in data streams, 2004; AMS sketch with one sign a number)."""
_CHUNK: Final = 1 << 18
"""Numbers that are put in float64 at once; on a CPU they fit into its caches."""
_CHUNK_ON_DEVICE: Final = 1 << 22
"""A chunk costs a dozen launches on a device: 124 M parameters took 73 ms in small ones with their signs sent along, and 30 ms in
these (H200, torch 2.11), and a proof of a GPT-2 small, with up to nine processes at once, 109 s and 54 s."""

_signs: list[Tensor] = []
"""Signs of the first places, in the host's memory: as many as the largest tensor so far has numbers, until `forget_signs`."""


class TensorDigest(NamedTuple):
    """Digest of one tensor: shape, checksum of its bits, norm, and its numbers (or, of many, their sketch) in float64."""

    shape: tuple[int, ...]
    bits: int
    norm: float
    sketch: Tensor
    eps: float = 0.0
    """The spacing of its dtype's numbers next to 1; 0 for whole numbers."""


def digest_of(tensor: Tensor) -> TensorDigest:
    """The digest of a tensor, which holds up to 4096 numbers as they are.

    Sketches can be subtracted: the norm of their difference estimates that of the tensors'. Integers and booleans become float64.
    """
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    flat = dense.contiguous().reshape(-1)
    norm, sketch = _norm_and_sketch(flat)
    eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    return TensorDigest(tuple(tensor.shape), checksum(flat), norm, sketch, eps)


def distance(one: TensorDigest, two: TensorDigest) -> float:
    """The norm of the difference of two tensors of one size, estimated from their digests; inf where one is not finite.

    >>> x = torch.arange(6.0)
    >>> distance(digest_of(x), digest_of(x + 1))
    2.449489742783178
    """
    gap = float(torch.linalg.vector_norm(one.sketch - two.sketch))
    return gap if gap == gap else float("inf")


def _norm_and_sketch(flat: Tensor) -> tuple[float, Tensor]:
    """The norm, and the numbers with random signs, added up in 4096 buckets; few numbers stay as they are."""
    if flat.numel() <= NUM_BUCKETS:
        numbers = flat.double()
        return float(torch.linalg.vector_norm(numbers)), numbers.cpu()
    is_host = flat.device.type == "cpu"
    numbers_of, signs_of = (_chunk_outside_the_heap() if is_host else Tensor.double for _ in range(2))
    size = _CHUNK if is_host else _CHUNK_ON_DEVICE
    total = torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=flat.device)
    norms = torch.zeros(-(-flat.numel() // size), dtype=torch.float64, device=flat.device)
    for number, start in enumerate(range(0, flat.numel(), size)):
        part = numbers_of(flat[start : start + size])
        norms[number] = torch.linalg.vector_norm(part)
        signs = _signs_to(flat.numel())[start:] if is_host else _drawn_signs(start, part.numel(), flat.device)
        part.mul_(signs_of(signs[: part.numel()]))
        whole = part.numel() - part.numel() % NUM_BUCKETS
        total += part[:whole].view(-1, NUM_BUCKETS).sum(0)
        total[: part.numel() - whole] += part[whole:]
    return float(torch.linalg.vector_norm(norms)), total.cpu()


def _chunk_outside_the_heap() -> Callable[[Tensor], Tensor]:
    """A function that copies a chunk as float64 into memory of its own, over the chunk before."""
    chunk = _outside_the_heap(8 * _CHUNK).view(torch.float64)
    return lambda part: chunk[: part.numel()].copy_(part)


def _signs_to(size: int) -> Tensor:
    """The signs of so many places, drawn once."""
    if not _signs or _signs[0].numel() < size:
        drawn = _outside_the_heap(size).view(torch.int8)
        for start in range(0, size, _CHUNK):
            part = drawn[start : start + _CHUNK]
            part.copy_(_drawn_signs(start, part.numel(), "cpu"))
        _signs[:] = [drawn]
    return _signs[0]


def _drawn_signs(start: int, num: int, device: torch.device | str) -> Tensor:
    """Plus and minus one for places from `start` on, the same in all processes and on all devices."""
    return (mixed_places(start, num, device) >> 63) * 2 + 1


def _outside_the_heap(num_bytes: int) -> Tensor:
    """Memory that goes back to the system with the tensor: what is recorded leaves no holes in the script's heap.

    glibc frees a block of 128 KiB to 32 MiB to the heap once a block of its size has been freed (mallopt(3), M_MMAP_THRESHOLD).
    Holes stay resident, and a hole that a gradient of the script fits into made its peak 11 % larger in half of all runs.
    """
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def forget_signs() -> None:
    """Release the memory of the signs; the next digest draws the same ones again."""
    _signs.clear()
