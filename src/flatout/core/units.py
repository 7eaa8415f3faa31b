"""Numbers as people read them: three significant digits, a unit that suits the size, '-' for what is not known."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

UNKNOWN: Final = "-"
BASIS: Final = {"trial": "measured by a trial", "timed": "measured in the steps", "estimate": "estimated"}
"""How a finding's gain is known."""
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DECIMAL: Final = ("", "k", "M", "G", "T", "P", "E")
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


class TimeUnit(NamedTuple):
    """One unit and one number of decimals, for times that stand in a column."""

    name: str
    seconds: float
    decimals: int

    def show(self, seconds: float) -> str:
        """The number without its unit; '<0.1' for what would round to nothing."""
        if not math.isfinite(seconds):
            return UNKNOWN
        smallest = 10.0**-self.decimals
        value = seconds / self.seconds
        if 0 < value < smallest / 2:
            return f"<{smallest:.{self.decimals}f}"
        return f"{value + 0.0:.{self.decimals}f}"


def time_unit(largest_s: float, *, digits: int = 3) -> TimeUnit:
    """The unit in which `largest_s` has `digits` significant digits."""
    largest_s = abs(largest_s)
    if largest_s == 0 or not math.isfinite(largest_s):
        return TimeUnit("ms", 1e-3, 1)
    for seconds, name in _TIMES:
        if float(f"{largest_s / seconds:.{digits - 1}e}") >= 1:
            return TimeUnit(name, seconds, _decimals(largest_s / seconds, digits))
    return TimeUnit("ns", 1e-9, _decimals(largest_s / 1e-9, digits))


def duration(seconds: float | None) -> str:
    """Seconds as text, in the unit that suits them.

    >>> duration(0.0382), duration(0.0009996), duration(None)
    ('38.2 ms', '1.00 ms', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    unit = time_unit(seconds)
    return f"{unit.show(seconds)} {unit.name}"


def long_duration(seconds: float) -> str:
    """Seconds as text, from two minutes on in minutes, hours or days.

    >>> long_duration(90), long_duration(1819), long_duration(28_800), long_duration(400_000)
    ('90.0 s', '30.3 min', '8.00 h', '4.63 d')
    """
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        value = seconds / length_s
        if 2 <= value < math.inf:
            return f"{value:.{_decimals(value, 3)}f} {unit}"
    return duration(seconds)


def size(num_bytes: float | None) -> str:
    """Bytes as text, with binary prefixes.

    >>> size(12), size(3 << 20)
    ('12 B', '3.00 MiB')
    """
    return _prefixed(num_bytes, base=1024, prefixes=_BINARY, unit="B")


def work(num_flop: float | None) -> str:
    """FLOP as text, with decimal prefixes.

    >>> work(1_210_000_000)
    '1.21 GFLOP'
    """
    return _prefixed(num_flop, base=1000, prefixes=_DECIMAL, unit="FLOP")


def work_rate(flop_per_s: float | None) -> str:
    """FLOP per second as text, with decimal prefixes.

    >>> work_rate(804e12)
    '804 TFLOP/s'
    """
    return _prefixed(flop_per_s, base=1000, prefixes=_DECIMAL, unit="FLOP/s")


def size_rate(bytes_per_s: float | None) -> str:
    """Bytes per second as text, with decimal prefixes, as data sheets count.

    >>> size_rate(4.26e12)
    '4.26 TB/s'
    """
    return _prefixed(bytes_per_s, base=1000, prefixes=_DECIMAL, unit="B/s")


def number(value: float | None) -> str:
    """A plain number as text, with three digits.

    >>> number(0.25), number(1234.5)
    ('0.250', '1234')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return "0" if value == 0 else f"{value:.{_decimals(value, 3)}f}"


def counted(number: int, noun: str) -> str:
    """So many of a thing, in its plural where they are not one.

    >>> counted(1, "step"), counted(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(fraction: float | None) -> str:
    """A fraction as text, in per cent.

    >>> percent(0.32), percent(0.012), percent(0.0001)
    ('32 %', '1.2 %', '<0.1 %')
    """
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    value = 100 * fraction
    if 0 < value < 0.05:
        return "<0.1 %"
    return f"{value:.0f} %" if value == 0 or abs(value) >= 9.95 else f"{value:.1f} %"


def speedup(gain: tuple[float, float]) -> str:
    """A range of speed-ups, with no more decimals than tell it from 1 and its ends from each other.

    >>> speedup((1.3, 1.6)), speedup((1.021, 1.043)), speedup((12.0, 31.0))
    ('1.3x - 1.6x', '1.02x - 1.04x', '12x - 31x')
    """
    low, high = gain
    decimals = 0 if low >= 9.95 else 1 if low >= 1.15 or high >= 2 else 2
    ends = [f"{end:.{decimals}f}x" if math.isfinite(end) else UNKNOWN for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} - {ends[1]}"


_MOST_PREDICTED: Final = 10.0
"""A step ten times as short is a tenth of what was measured: its noise, and what the cure itself takes, are no longer small."""
_WIDEST_PREDICTED: Final = 2.0
"""A range whose ends are further apart tells nothing that one could plan with."""


def predicted_speedup(gain: tuple[float, float]) -> str:
    """A predicted range of speed-ups, as far as it can be known; '' where not even its lower end can.

    >>> predicted_speedup((1.3, 1.6)), predicted_speedup((1.18, 4.49)), predicted_speedup((1.0, 3.0))
    ('1.3x - 1.6x', 'at least 1.2x', '')
    >>> predicted_speedup((7.0, 12.5)), predicted_speedup((12.0, 25.0))
    ('at least 7.0x', 'more than 10x')
    """
    low, high = gain
    if low >= _MOST_PREDICTED:
        return f"more than {_MOST_PREDICTED:.0f}x"
    if high <= min(_WIDEST_PREDICTED * low, _MOST_PREDICTED):
        return speedup(gain)
    return f"at least {speedup((low, low))}" if low >= 1.02 else ""


def _prefixed(value: float | None, *, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    index = 0
    while abs(value) >= 999.5 and index < len(prefixes) - 1:
        value /= base
        index += 1
    shown = f"{value:g}" if index == 0 and value == int(value) else number(value)
    return f"{shown} {prefixes[index]}{unit}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits, after rounding (9.996 rounds to 10.0)."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(0, digits - 1 - exponent)
