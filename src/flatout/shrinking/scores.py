"""What a user's metric says, and how much of it was lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from flatout.compression.searching.intervals import paired_difference
from flatout.errors import UsageError
from flatout.levers.subjects import Subject

FEWEST = 30
"""Samples from which an interval of the loss is told."""


class Score(NamedTuple):
    """The metric: its mean, and one number a sample where it comes so."""

    value: float
    samples: tuple[float, ...] | None = None


def score_of(subject: Subject) -> Score:
    """What the user's metric says of a subject.

    Raises UsageError when that is neither a number nor numbers.
    """
    said = subject.metric()
    if hasattr(said, "tolist"):  # a tensor or an array
        said = said.tolist()
    try:
        if isinstance(said, Iterable):
            samples = tuple(float(one) for one in said)
            return Score(math.fsum(samples) / len(samples), samples)
        return Score(float(said))
    except (TypeError, ValueError, ZeroDivisionError) as e:
        raise UsageError(
            f"the metric returned a {type(said).__name__}; return a number, or a number for each sample: {e}"
        ) from e


def lost(given: Score, now: Score, *, is_cost: bool) -> tuple[float, tuple[float, float] | None]:
    """What of the metric went, positive where it is worse, and the 95 % interval of that where samples can be paired.

    >>> lost(Score(0.9), Score(0.75), is_cost=False)[0] == 0.9 - 0.75
    True
    """
    better, worse = (now, given) if is_cost else (given, now)
    if better.samples is None or worse.samples is None or len(better.samples) < FEWEST:
        return better.value - worse.value, None
    if not all(map(math.isfinite, (*better.samples, *worse.samples))):
        return math.nan, None
    found = paired_difference(better.samples, worse.samples)
    return found.value, (found.low, found.high)
