"""The largest of many: how long a step waits for the slowest of its ranks."""

from __future__ import annotations

from functools import cache
from math import erf, sqrt
from typing import Final

_REACH: Final = 9.0
"""Deviations beyond which a normal law has nothing left for a double."""
_STEPS: Final = 4000


@cache
def expected_largest(num: int) -> float:
    """The mean of the largest of `num` independent standard normal numbers, in deviations.

    The integral of 1 - P^n over the positive half less that of P^n over the negative one (David and Nagaraja, Order Statistics,
    2003, section 3.1), by the trapezoidal rule.

    >>> [round(expected_largest(n), 3) for n in (1, 2, 1024)]
    [0.0, 0.564, 3.248]
    """
    width = _REACH / _STEPS

    def below(x: float) -> float:
        return float((0.5 * (1 + erf(x / sqrt(2)))) ** num)

    inner = sum(1 - below(i * width) - below(-i * width) for i in range(1, _STEPS))
    return width * (inner + 0.5 * (1 - 2 * below(0.0)))
