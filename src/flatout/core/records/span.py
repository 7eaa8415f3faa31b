"""One real step on a time axis: what the report's timeline and the exported trace draw."""

from __future__ import annotations

from flatout.core.records.record import Record


class Span(Record, frozen=True, kw_only=True):
    """Something that ran from `start_s` for `duration_s` (from the step's start), on a track: 'phase', 'host', 'device', 'copy'.

    `name` is the phase, operator or kernel; `is_wait`: its track waited for another in that time.
    """

    track: str
    name: str
    start_s: float
    duration_s: float
    source: int = -1
    is_wait: bool = False


class StepTimeline(Record, frozen=True, kw_only=True):
    """The spans of one step. `is_scaled` when operator times of a deep step were fitted into an undisturbed step's phases."""

    duration_s: float
    spans: tuple[Span, ...] = ()
    is_scaled: bool = False
    num_left_out: int = 0
    """Spans that were too short (the longest are stored, so many that a report stays small)."""
