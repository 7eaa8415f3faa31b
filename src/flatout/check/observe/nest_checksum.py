"""Checksums of nests of tensors, bit for bit."""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch

from flatout.check.observe.calls import is_wrapper
from flatout.core.tensors.host_bytes import host_bytes
from flatout.core.tensors.nests import tensors_in

_MOST_HASHED_BYTES: Final = 64 << 20


def nest_checksum(value: Any) -> int:
    """The checksum of all tensors in a nest, never 0; 0 for what is too large or holds no tensor."""
    tensors = list(tensors_in(value))
    if not tensors or any(is_wrapper(t) or t.is_sparse or t.layout != torch.strided for t in tensors):
        return 0
    if sum(t.numel() * t.element_size() for t in tensors) > _MOST_HASHED_BYTES:
        return 0
    checksum = 1
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        checksum = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), checksum)
        if flat.numel():
            on_host = flat.view(torch.uint8).cpu()
            checksum = zlib.crc32(host_bytes(on_host), checksum)
    return checksum or 1
