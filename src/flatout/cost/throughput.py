"""What a saving is worth."""

from __future__ import annotations

from flatout.errors import UsageError


def speed_up(step_s: float, saved_s: float) -> float:
    """How many times faster a step of `step_s` seconds is when `saved_s` of them are gone (Amdahl 1967).

    Negative `saved_s` makes it slower. Raises UsageError unless saved_s < step_s.

    >>> speed_up(0.2, 0.1)
    2.0
    """
    if not saved_s < step_s:
        raise UsageError(f"saved_s {saved_s} must be less than step_s, which is {step_s}")
    return step_s / (step_s - saved_s)
