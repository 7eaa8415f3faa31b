"""How far an observation has come: what the observed process reports to the one that waits for it."""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record

Doing = Literal[
    "starting", "waiting for a step", "warm-up", "timing", "looking closely", "trials", "timing again", "done"
]


class Progress(Record, frozen=True, kw_only=True):
    """`num_steps` observed so far; `left_s` is what is left for light observation, the closer looks and trials besides."""

    doing: Doing
    num_steps: int = 0
    left_s: float | None = None
