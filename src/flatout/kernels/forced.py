"""The kernel that a call runs: the one it names, or the first that refuses nothing."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.choice import chosen
from flatout.records.kernel import Kernel
from flatout.registry import kernels


def kernel_for(op: str, id: str | None, /, *args: Any, **kwargs: Any) -> Kernel:
    """The kernel of this id, or of those of `op` the first that these arguments suit.

    Raises UsageError when there is no such kernel, or it refuses these arguments.
    """
    if id is None:
        return chosen(op, *args, **kwargs).kernel
    known = {kernel.id: kernel for kernel in kernels(op)}
    if id not in known:
        raise UsageError(f"kernel '{id}' does not implement '{op}'; there are {', '.join(known)}")
    why = known[id].refusal(*args, **kwargs)
    if why is not None:
        raise UsageError(f"kernel '{id}' cannot run this: {why}; name another, or none to have one chosen")
    return known[id]


def no_triton(*tensors: Tensor | None) -> str | None:
    """Why a Triton kernel cannot take these tensors; None when it can."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            return f"a tensor is on '{tensor.device}'; Triton's kernels run on GPUs"
        if tensor is not None and tensor.is_floating_point() and tensor.element_size() > 4:
            return f"a tensor is {tensor.dtype}; these kernels compute in float32"
    return None if _has_triton() else "the package 'triton' is not installed"


@cache
def _has_triton() -> bool:
    """Once for all: a search of the file system at each call would cost more than the kernel."""
    return find_spec("triton") is not None
