"""Products as lines: the times of the vendor's library and of others, which is taken, and how far the floor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.core import units


class ProductLine(NamedTuple):
    """One problem under one clock. `times` are (name, seconds), the vendor's first; `taken` names the one that runs."""

    problem: str
    clock: str
    times: Sequence[tuple[str, float]]
    taken: str
    floor_s: float | None


def product_text(line: ProductLine) -> str:
    """The line of one product under one clock.

    >>> times = [("vendor", 19.1e-6), ("padded", 12e-6), ("triton(128x256x64)", 11.1e-6)]
    >>> print(product_text(ProductLine("1000x1000x1000 bfloat16 nn", "device", times, times[2][0], 2.5e-6)))
    1000x1000x1000 bfloat16 nn, device: vendor 19.1, padded 12.0, triton(128x256x64) 11.1 us <-; floor 2.5 us (x4.44)
    """
    unit = units.time_unit(max(seconds for _, seconds in line.times))
    taken_s = dict(line.times)[line.taken]
    shown = [f"{name} {unit.show(seconds)}" for name, seconds in line.times]
    texts = [
        text + f" {unit.name} <-" * (name == line.taken) for text, (name, _) in zip(shown, line.times, strict=True)
    ]
    if line.floor_s is None:
        return f"{line.problem}, {line.clock}: {', '.join(texts)}; floor {units.UNKNOWN}"
    floor = f"floor {unit.show(line.floor_s)} {unit.name} (x{units.number(taken_s / line.floor_s)})"
    return f"{line.problem}, {line.clock}: {', '.join(texts)}; {floor}"
