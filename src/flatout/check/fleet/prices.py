"""What hours cost, and means that time weighs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from flatout.core.records.fleet import Hours


class PriceList(NamedTuple):
    """Prices of an hour; by the GPU's name where `gpus` has it. None: not known, and then nothing costs anything."""

    gpu_hour: float | None = None
    core_hour: float | None = None
    gpus: tuple[tuple[str, float], ...] = ()
    currency: str = "$"

    def cost(self, hours: Hours, device: str = "") -> float | None:
        """What these hours cost on a device; None where a price is missing that they need."""
        gpu_hour = dict(self.gpus).get(device, self.gpu_hour)
        if (hours.gpu and gpu_hour is None) or (hours.core and self.core_hour is None):
            return None
        if gpu_hour is None and self.core_hour is None:
            return None
        return hours.gpu * (gpu_hour or 0.0) + hours.core * (self.core_hour or 0.0)

    def costs(self, low: Hours, high: Hours, device: str = "") -> tuple[float, float] | None:
        """What a range of hours costs."""
        least, most = self.cost(low, device), self.cost(high, device)
        return (least, most) if least is not None and most is not None else None


NO_PRICES: Final = PriceList()


def summed(costs: Iterable[float | None]) -> float | None:
    """The sum of what is known; None where nothing is."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def summed_range(costs: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The sums of both ends; None where nothing is known."""
    known = [cost for cost in costs if cost is not None]
    return (sum(low for low, _ in known), sum(high for _, high in known)) if known else None


def weighted_mean(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """The mean of values by their weights; None where there is no value.

    >>> weighted_mean([(0.5, 1.0), (1.0, 3.0), (None, 100.0)])
    0.875
    """
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    sum_of_hours = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / sum_of_hours if sum_of_hours else None


def sum_of_hours(hours: Iterable[Hours]) -> Hours:
    """The hours of several parts together."""
    found = Hours()
    for one in hours:
        found = found + one
    return found
