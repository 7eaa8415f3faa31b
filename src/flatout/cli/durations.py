"""Times as they are written on the command line."""

from __future__ import annotations

from typing import Final

from flatout.errors import UsageError

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str, *, name: str) -> float:
    """'5m' in seconds. Raises UsageError for anything else, and for what is not above 0; `name` is the option's.

    >>> seconds_of("5m", name="--budget")
    300.0
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name} {text} is no time above 0; write 300, 300s, 5m or 1h")
    return seconds
