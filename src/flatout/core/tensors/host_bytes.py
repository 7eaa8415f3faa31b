"""The bytes of a tensor in the host's memory, without a copy and without NumPy, which need not be installed."""

from __future__ import annotations

import ctypes

from torch import Tensor


def host_bytes(tensor: Tensor) -> memoryview:
    """A view of the bytes of a contiguous tensor on the CPU, which keeps the tensor alive.

    `Tensor.numpy` needs NumPy, and makes a storage one that cannot be resized.

    Raises ValueError where the tensor has no memory of its own, as a wrapper of others.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    start = tensor.untyped_storage().data_ptr()  # not Tensor.data_ptr, whose calls flatout.check takes for the user's
    if num_bytes and (not start or tensor.device.type != "cpu" or not tensor.is_contiguous()):
        raise ValueError(
            f"a {type(tensor).__name__} on '{tensor.device}' has no bytes in the host's memory in one piece"
        )
    if not num_bytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * num_bytes).from_address(start + int(tensor.storage_offset()) * tensor.element_size())
    array.owner = tensor  # type: ignore[attr-defined]  # goes when the last view of the array does
    return memoryview(array)
