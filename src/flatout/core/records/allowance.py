"""How much worse a result may become: in its own unit, or as a share of what it was."""

from __future__ import annotations

import math

from flatout.core.errors import UsageError
from flatout.core.records.record import Record


class Allowance(Record, frozen=True, kw_only=True):
    """What of a metric may be lost: in its own unit, or relative to what the original has."""

    value: float = 0.0
    is_relative: bool = False

    @classmethod
    def of(cls, text: str | float, *, name: str = "a loss of") -> Allowance:
        """Read an allowance: '1%' of the original's metric, or '0.01' in its unit; `name` is the option's.

        >>> Allowance.of("1%").of_metric(0.5)
        0.005

        Raises UsageError for anything else, and below 0.
        """
        number, percent, rest = str(text).strip().partition("%")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if rest or not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"{name} '{text}' cannot be allowed; write '1%' of the metric, or '0.01' in its own unit, 0 or more"
            )
        return cls(value=value / 100 if percent else value, is_relative=bool(percent))

    def of_metric(self, metric: float) -> float:
        """The allowed loss in the metric's own unit."""
        return self.value * abs(metric) if self.is_relative else self.value
