"""Kernels in CUDA C, compiled for the device at hand when they are first run, by the compiler that torch brings along (NVRTC)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flatout.core.errors import UsageError

_OLDEST: Final = (8, 0)
"""The first with bfloat16 on its matrix units."""
_EARLY: Final = (9, 0)
"""The first on which a launch may begin before the end of the one before it."""
_SHARED_BYTES: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cuda.h
_COOPERATIVE: Final = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, cuda.h
_CLUSTER: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cuda.h
_OVERLAPPING: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, cuda.h
_UNASKED_BYTES: Final = 32 * 1024
"""Of 48 KiB of shared memory that a program may have unasked on every device; the rest is for what a kernel declares."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Function:
    """A compiled kernel on one device. A call launches it on the current stream; on Hopper and later it may begin early, so it
    must wait for the launch before it by itself (griddepcontrol.wait).

    `is_side_by_side`: all programs run at once, or the launch is refused. `cluster`: so many programs each way run side
    by side and see each other's shared memory (Hopper and later).
    Arguments are tensors (their address; None: no address), integers (32 bits) and floats (32 bits), as the kernel declares.
    """

    def __init__(self, handle: ctypes.c_void_p, device: torch.device) -> None:
        self._handle, self._device = handle, device
        self._allowed_bytes = _UNASKED_BYTES
        self._is_early = has_early_launches(device)

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *args: Tensor | int | float | None,
        cluster: tuple[int, int, int] = (1, 1, 1),
        is_side_by_side: bool = False,
    ) -> None:
        if shared_bytes > self._allowed_bytes:
            _check_status(_driver().cuFuncSetAttribute(self._handle, _SHARED_BYTES, shared_bytes), "shared memory")
            self._allowed_bytes = shared_bytes
        c_arguments = [_as_c(a) for a in args]
        pointers = (ctypes.c_void_p * len(c_arguments))(*(ctypes.addressof(a) for a in c_arguments))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        attributes = self._attributes(cluster, is_side_by_side)
        config = _Config(*grid, threads, 1, 1, shared_bytes, stream, attributes, len(attributes))
        _check_status(_driver().cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None), "a launch")

    def _attributes(self, cluster: tuple[int, int, int], is_side_by_side: bool) -> ctypes.Array[_Attribute]:
        if is_side_by_side:  # waits for room for all programs at once, so it cannot begin early
            return (_Attribute * 1)(_Attribute(_COOPERATIVE, 0, (1, 0, 0)))
        early = [_Attribute(_OVERLAPPING, 0, (1, 0, 0))] if self._is_early else []
        clustered = [_Attribute(_CLUSTER, 0, cluster)] if cluster != (1, 1, 1) else []
        return (_Attribute * (len(early) + len(clustered)))(*early, *clustered)


def compiled(paths: Sequence[Path], name: str, constants: Mapping[str, int], device: torch.device) -> Function:
    """`name` (extern "C") of files, one after the other, with constants as macros; 0.3 s, and who calls this caches it.

    Raises UsageError with the compiler's words, and where there is no compiler.
    """
    why = why_not(device)
    if why is not None:
        raise UsageError(f"'{name}' cannot be compiled: {why}")
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())]
    image = _translated(source, name, options)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # a thread that has launched nothing has no context yet
        _check_status(_driver().cuModuleLoadData(ctypes.byref(module), image), "loading")
        _check_status(_driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), "looking up")
    return Function(handle, device)


def why_not(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device; None when it can.

    >>> why_not(torch.device("cpu"))
    "kernels in CUDA C run on GPUs, not on 'cpu'"
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels in CUDA C run on GPUs, not on '{device}'"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return "the device is older than Ampere and has no bfloat16 on its matrix units"
    return None if _library() is not None else "NVRTC is not found; install nvidia-cuda-nvrtc of torch's CUDA version"


def has_early_launches(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended, and programs may be clusters: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _EARLY


def _translated(source: str, name: str, options: list[str]) -> bytes:
    """Machine code of a source. Raises UsageError with the compiler's words."""
    library = _library()
    assert library is not None  # what calls this has asked
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    c_options = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(options), c_options) != 0:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise UsageError(f"'{name}' cannot be compiled with {options}: {log.value.decode()}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _as_c(value: Tensor | int | float | None) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def _check_status(status: int, doing: str) -> None:
    if status != 0:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(words))
        raise UsageError(f"the CUDA driver refuses {doing} of a kernel: {(words.value or b'unknown').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _library() -> ctypes.CDLL | None:
    """Of torch's CUDA version: where the loader finds it, or in the packages that torch's wheels need."""
    major = (torch.version.cuda or "0").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for path in [name, *(str(found) for folder in folders for found in sorted(folder.glob(f"*/lib/{name}")))]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None
