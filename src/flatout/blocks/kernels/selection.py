"""The implementation of an operation that runs these arguments, named or the first that can, and why no other does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor

from flatout.blocks.kernels.opaque import composed
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels


class KernelSelection(NamedTuple):
    """The kernel that is taken, and of each that comes before it why it cannot be."""

    kernel: Kernel
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.kernel.id}: {self.kernel.title}", *(f"  not {id}: {why}" for id, why in self.refusals)]
        )


def select_kernel(op: str, /, *args: Any, **kwargs: Any) -> KernelSelection:
    """The first kernel of `op` that refuses nothing of these arguments; the reference takes everything."""
    refusals: list[tuple[str, str]] = []
    for kernel in kernels(op):
        why = kernel.refusal(*args, **kwargs)
        if why is None:
            return KernelSelection(kernel, tuple(refusals))
        refusals.append((kernel.id, why))
    raise AssertionError(f"the reference of '{op}' refuses; it must take everything")


def kernel_for(op: str, id: str | None, /, *args: Any, **kwargs: Any) -> Kernel:
    """The kernel of this id, or of those of `op` the first that these arguments suit.

    Raises UsageError when there is no such kernel, or it refuses these arguments.
    """
    if id is None:
        return select_kernel(op, *args, **kwargs).kernel
    known = {kernel.id: kernel for kernel in kernels(op)}
    if id not in known:
        raise UsageError(f"kernel '{id}' does not implement '{op}'; there are {', '.join(known)}")
    why = known[id].refusal(*args, **kwargs)
    if why is not None:
        raise UsageError(f"kernel '{id}' cannot run this: {why}; name another, or none to have one chosen")
    return known[id]


def kernel_operator(op: str, arguments: str) -> Callable[..., Any]:
    """The composed operator of `op` that runs the kernel of an id, or the first that can.

    `arguments` is its schema without the name; the last are keywords, `str? kernel` among them. Where it ends in `Tensor[]`, one
    result is a list too.
    """
    is_list = arguments.endswith("Tensor[]")

    @composed(op.rpartition(".")[2] + arguments)
    def run(*args: Any, kernel: str | None, **options: Any) -> Any:
        results = kernel_for(op, kernel, *args, **options).run(*args, **options)
        return [results] if is_list and isinstance(results, Tensor) else list(results) if is_list else results

    return run


def no_triton(*args: object, **options: object) -> str | None:
    """Why a Triton kernel cannot take the tensors among these arguments; None when it can."""
    for tensor in (*args, *options.values()):
        if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
            return f"a tensor is on '{tensor.device}'; Triton's kernels run on GPUs"
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.element_size() > 4:
            return f"a tensor is {tensor.dtype}; these kernels compute in float32"
    return None if _has_triton() else "the package 'triton' is not installed"


@cache
def _has_triton() -> bool:
    """Once for all: a search of the file system at each call would cost more than the kernel."""
    return find_spec("triton") is not None
