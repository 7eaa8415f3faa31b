"""Arguments of a step as tensors of the sizes that a package was compiled for, and the tensors that it carries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from flatout.core.errors import NativeError, UsageError
from flatout.core.records.native import Port

Buffer: TypeAlias = Any
"""A tensor on the CPU, a NumPy array, or anything with the buffer protocol."""
DTYPES: Final = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
_FORMATS: Final = {"float32": "f", "int32": "il", "int64": "lq", "bool": "?"}


def port_of(name: str, tensor: Tensor) -> Port:
    """Raises NativeError for a dtype that engines do not take."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise NativeError(f"'{name}' is {dtype}; engines take {', '.join(DTYPES)}")
    return Port(name=name, dtype=dtype, shape=tuple(tensor.shape))


def tensor_at(value: Buffer, port: Port, lead: tuple[int, ...], *, is_written: bool = False) -> Tensor:
    """The value as a contiguous tensor of the port's dtype and of shape (*lead, *port.shape). Copied only where it must be.

    Raises UsageError where sizes or dtypes do not fit, or, if `is_written`, where the memory cannot be used as it is.
    """
    dtype = DTYPES[port.dtype]
    if isinstance(value, Tensor):
        tensor = value
    elif _is_plain_array(value, port):
        tensor = torch.from_numpy(value)
    else:
        return _from_buffer(value, port, lead, is_written=is_written)
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise UsageError(f"'{port.name}' is {port.dtype} on the CPU, got {tensor.dtype} on {tensor.device}; convert it")
    is_plain = tensor.is_contiguous()
    if not lead and is_plain and tensor.shape == port.shape:
        return tensor  # what nearly every event is
    _check_size(tensor.numel() * dtype.itemsize, port, lead)
    if is_written and not is_plain:
        raise _unwritable(port)
    return tensor.contiguous().reshape((*lead, *port.shape))


def _is_plain_array(value: Buffer, port: Port) -> bool:
    """Whether it is a NumPy array that torch takes as it is: ten times faster than the way through the buffer protocol."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype != port.dtype:
        return False
    flags = value.flags
    return bool(flags.c_contiguous and flags.writeable and value.dtype.isnative)


def _from_buffer(value: Buffer, port: Port, lead: tuple[int, ...], *, is_written: bool) -> Tensor:
    dtype = DTYPES[port.dtype]
    with memoryview(value) as view:
        size = view.itemsize
        if size not in (1, dtype.itemsize) or (size > 1 and view.format not in _FORMATS[port.dtype]):
            raise UsageError(f"'{port.name}' is {port.dtype}, got a buffer of format '{view.format}'; convert it")
        _check_size(view.nbytes, port, lead)
        is_usable = view.c_contiguous and not view.readonly
        if is_written and not is_usable:
            raise _unwritable(port)
        # torch warns of memory that it must not write to
        whole: Any = value if is_usable else bytearray(view)
        found = torch.frombuffer(whole, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)
    return found.reshape((*lead, *port.shape))


def _unwritable(port: Port) -> UsageError:
    return UsageError(f"out for '{port.name}' cannot be written in one piece; give a contiguous, writable buffer")


def _check_size(num_bytes: int, port: Port, lead: tuple[int, ...]) -> None:
    expected = prod(lead) * port.num_bytes
    if num_bytes != expected:
        raise UsageError(
            f"'{port.name}' is {port.dtype} of shape {(*lead, *port.shape)}: got {num_bytes} bytes, expected {expected}"
        )


def output_targets(out: Any, ports: Sequence[Port], lead: tuple[int, ...]) -> tuple[Any, list[Tensor]]:
    """What step returns, and the tensors that its outputs go to, which are the same memory."""
    if out is None:
        targets = [torch.empty((*lead, *port.shape), dtype=DTYPES[port.dtype]) for port in ports]
        arrays = tuple(tensor.numpy() for tensor in targets)
        return (arrays[0] if len(arrays) == 1 else arrays), targets
    buffers = out if isinstance(out, tuple) else (out,)
    if len(buffers) != len(ports):
        raise UsageError(f"out has {len(buffers)} buffers; give {len(ports)}, as a tuple")
    return out, [tensor_at(buffer, port, lead, is_written=True) for buffer, port in zip(buffers, ports, strict=True)]


class CarriedState:
    """What is carried, twice: a package may hand out its inputs as outputs, so new values are never written over those in use."""

    def __init__(self, start: Sequence[Tensor]) -> None:
        self.start = tuple(start)
        self.now, self.after = [tensor.clone() for tensor in start], [torch.empty_like(tensor) for tensor in start]

    def swap(self) -> None:
        """What was written becomes what is read."""
        self.now, self.after = self.after, self.now

    def reset(self) -> None:
        """Copy the first values into the current state."""
        for current, first in zip(self.now, self.start, strict=True):
            current.copy_(first)

    def snapshot(self) -> bytes:
        """All numbers in C order, each tensor's beginning at a multiple of 8 bytes."""
        parts = [
            bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
            for tensor in self.now
        ]
        return b"".join(part.ljust(_up(len(part)), b"\0") for part in parts)

    def restore(self, snapshot: bytes) -> None:
        """The values of a snapshot. Raises UsageError for bytes of another length."""
        expected = sum(_up(tensor.nbytes) for tensor in self.now)
        if len(snapshot) != expected:
            raise UsageError(f"a snapshot of this model has {expected} bytes, got {len(snapshot)}")
        at = 0
        for current in self.now:
            if current.numel():
                numbers = bytearray(snapshot[at : at + current.nbytes])
                current.copy_(torch.frombuffer(numbers, dtype=current.dtype).reshape(current.shape))
            at += _up(current.nbytes)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def num_bytes_of(value: Buffer) -> int:
    """The bytes of all numbers in a buffer."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else memoryview(value).nbytes
