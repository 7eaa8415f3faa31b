"""Exact cancellations: two numbers that were computed in two ways, rounded alike, and leave nothing when they are subtracted.

They are what breaks when a compiler rounds one of the two ways differently, with a fused multiply-add that keeps the product
whole: x * x - y * y is 0 for x = y, and fma(x, x, -(y * y)) is the rounding error of y * y. The root of that, its logarithm or
its inverse is NaN or infinite, or merely huge.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.expect.bits import first_pair

_SUMS: Final = ("aten::sub", "aten::sub_", "aten::rsub", "aten::add", "aten::add_")


class Cancelled(NamedTuple):
    """Numbers that cancelled exactly in an operator of eager code, though neither of the two was 0; the index of the line."""

    op: str
    site: int
    number: int


class CancellationMode(TorchDispatchMode):
    """Looks at sums and differences of floating-point tensors while entered; `found` are those that cancelled."""

    supports_higher_order_operators = True

    def __init__(self, sites: Sites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Cancelled] = []
        self._sites = sites

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        is_sum = name in _SUMS and len(args) > 1 and isinstance(args[0], Tensor) and args[0].is_floating_point()
        there = args[0] != 0 if is_sum else None
        out = func(*args, **(kwargs or {}))
        if there is not None and isinstance(args[1], Tensor):
            number = int((there & (out == 0)).sum())
            if number:
                self.found.append(Cancelled(name, self._sites.of_frame(sys._getframe(1)), number))
        return out


def uncancelled(compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What a cancellation that no longer is exact leaves: (tensor, a number in words) for each tensor that shows it.

    A number that eager has finite and compiled code has not, which is told first, or one that is exactly 0 in eager alone.
    """
    for name, ours in compiled.items():
        theirs = eager.get(name)
        if theirs is None or theirs.shape != ours.shape or not ours.is_floating_point() or not ours.numel():
            continue
        bad = (~ours.isfinite() & theirs.isfinite()) | ((theirs == 0) & (ours != 0))
        number = int(bad.sum())
        if number:
            worst = bad & ~ours.isfinite()
            pair = first_pair(ours, theirs, worst if worst.any() else bad, "eager")
            yield name, f"{pair}, {number} of {ours.numel()} numbers"
