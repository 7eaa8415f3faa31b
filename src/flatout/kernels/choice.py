"""Which implementation of an operation runs these arguments, and why not another."""

from __future__ import annotations

from typing import Any, NamedTuple

from flatout.records.kernel import Kernel
from flatout.registry import kernels


class Choice(NamedTuple):
    """The kernel that is taken, and of each that comes before it why it cannot be."""

    kernel: Kernel
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.kernel.id}: {self.kernel.title}", *(f"  not {id}: {why}" for id, why in self.refusals)]
        )


def chosen(op: str, /, *args: Any, **kwargs: Any) -> Choice:
    """The first kernel of `op` that refuses nothing of these arguments; the reference takes everything."""
    refusals: list[tuple[str, str]] = []
    for kernel in kernels(op):
        why = kernel.refusal(*args, **kwargs)
        if why is None:
            return Choice(kernel, tuple(refusals))
        refusals.append((kernel.id, why))
    raise AssertionError(f"the reference of '{op}' refuses; it must take everything")
