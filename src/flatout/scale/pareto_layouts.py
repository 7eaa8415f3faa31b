"""How many devices: layouts that no other beats in seconds, memory and number of devices, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from flatout.core.errors import PlanError
from flatout.core.records.scale import Cluster, ModelShape, ParetoLayout, Software
from flatout.machine.specs.catalog import load_spec
from flatout.scale.candidates import divisors
from flatout.scale.search import ranked_by_memory
from flatout.scale.usual import usual_constants

_MOST_COUNTS: Final = 8
"""Numbers of devices that are looked at where nobody names them: all there are, then a half, and so on."""


def pareto(
    model: ModelShape,
    cluster_of: Callable[[int], Cluster],
    global_batch: int,
    software: Software | None = None,
    *,
    num_devices: Sequence[int],
    preset: str = "",
) -> tuple[ParetoLayout, ...]:
    """Layouts on each of several numbers of devices, without those that another beats: it takes no more seconds, no more memory
    of a device and no more devices. The most devices first, and of these the fastest.

    `cluster_of` gives the cluster of so many devices. Energy is what the devices take at the power limits of their data sheet
    (None where it has none): more than they take while they wait.

    Raises PlanError when nothing fits on any of them, HardwareError when the data sheet lacks a figure.
    """
    software = software or Software()
    rows: list[ParetoLayout] = []
    for number in sorted(set(num_devices), reverse=True):
        cluster = cluster_of(number)
        constants = usual_constants(model, cluster, software).constants
        power = load_spec(cluster.device).power_w
        try:
            found = ranked_by_memory(model, cluster, global_batch, software, constants, preset=preset)
        except PlanError:  # so many devices cannot share the batch
            continue
        for one in found:
            device_s = number * one.step.total_s
            energy_j = None if power is None else power.value * device_s
            rows.append(ParetoLayout(num_devices=number, ranked=one, device_s=device_s, energy_j=energy_j))
    if not rows:
        counts = ", ".join(map(str, sorted(set(num_devices))))
        raise PlanError(f"no layout fits on {counts} devices; give more devices, or another batch")
    return tuple(row for row in rows if not any(_beats(other, row) for other in rows))


def _beats(one: ParetoLayout, other: ParetoLayout) -> bool:
    """Whether a layout is as good in all, and better in something."""
    ours, theirs = _figures(one), _figures(other)
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _figures(row: ParetoLayout) -> tuple[float, ...]:
    return row.ranked.step.total_s, row.ranked.memory.total_bytes, row.num_devices


def usual_numbers(most: int) -> tuple[int, ...]:
    """All devices, a half, a quarter and so on, as far as they divide.

    >>> usual_numbers(48)
    (48, 24, 12, 6, 3, 1)
    """
    return tuple(n for n in (most >> power for power in range(_MOST_COUNTS)) if n and n in divisors(most))
