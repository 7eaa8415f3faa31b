"""Digests of tensors: small stand-ins that show whether two tensors have the same bits, and how far from each other they are."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.core.tensors.checksum import checksum

NUM_BUCKETS: Final = 4096
"""Numbers of a sketch. The estimate of a squared distance then has a relative standard deviation of sqrt(2 / 4096) = 2.2 %
(Charikar, Chen, Farach-Colton: Finding frequent items in data streams, 2004; AMS sketch with one sign a number)."""
_CHUNK: Final = 1 << 22
"""Numbers that are put in float64 at once."""

_signs: dict[int, Tensor] = {}
"""Signs by the size of tensors, in the host's memory: as much as a quarter of all parameters, until `forget_signs`."""


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
    norm = float(
        torch.linalg.vector_norm(flat.double() if flat.numel() <= _CHUNK else flat.float(), dtype=torch.float64)
    )
    eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    return TensorDigest(tuple(tensor.shape), checksum(flat), norm, _sketch(flat).cpu(), eps)


def distance(one: TensorDigest, two: TensorDigest) -> float:
    """The norm of the difference of two tensors of one size, estimated from their digests; inf where one is not finite.

    >>> x = torch.arange(6.0)
    >>> distance(digest_of(x), digest_of(x + 1))
    2.449489742783178
    """
    gap = float(torch.linalg.vector_norm(one.sketch - two.sketch))
    return gap if gap == gap else float("inf")


def _sketch(flat: Tensor) -> Tensor:
    """Numbers with random signs, added up in 4096 buckets; few stay as they are."""
    if flat.numel() <= NUM_BUCKETS:
        return flat.double()
    signs = _signs_of(flat.numel())
    total = torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double() * signs[start : start + _CHUNK].to(flat.device)
        whole = part.numel() - part.numel() % NUM_BUCKETS
        total += part[:whole].view(-1, NUM_BUCKETS).sum(0)
        total[: part.numel() - whole] += part[whole:]
    return total


def _signs_of(size: int) -> Tensor:
    """Plus and minus one, the same for tensors of one size in all processes, from a generator of its own."""
    if size not in _signs:
        generator = torch.Generator().manual_seed(size)
        _signs[size] = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return _signs[size]


def forget_signs() -> None:
    """Release the memory of the signs; the next digest of a size draws the same ones again."""
    _signs.clear()
