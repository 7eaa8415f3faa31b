"""Seconds, bytes and the lost metric of a candidate, beside those of the original model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from flatout.core.records.shrink import Range
from flatout.machine.measure.timer import Timing, compare_times
from flatout.shrink.candidate import CandidateModel, MetricScore
from flatout.shrink.compose.training import Training
from flatout.shrink.score_intervals import paired_difference

FEWEST: Final = 30
"""Samples from which on an interval of the loss is computed."""


class CandidateMeasurement(NamedTuple):
    """Time and bytes of a candidate, as a `Point` has them."""

    call_s: Range
    faster: Range
    num_pairs: int
    num_bytes: int


def of_calls(candidate: CandidateModel, original: CandidateModel, *, seconds: float) -> CandidateMeasurement:
    """Calls with the inputs of each, in inference mode, in turn with those of the original model for about `seconds`."""
    device = next((p.device for p in original.model.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        found = compare_times(
            {
                "given": lambda: original.call(*original.inputs),
                "now": candidate.timed or (lambda: candidate.call(*candidate.inputs)),
            },
            device=device,
            min_time_s=seconds / 2,
            max_time_s=seconds,
        )
    return _measured(found, candidate.num_bytes)


def of_steps(now: Training, original: Training, *, seconds: float) -> CandidateMeasurement:
    """Steps of training on one batch, in turn with those of the original model."""
    steps: dict[str, Callable[[], object]] = {"given": original.step, "now": now.step}
    found = compare_times(steps, device=now.device, min_time_s=seconds / 2, max_time_s=seconds)
    return _measured(found, now.num_bytes)


def _measured(found: dict[str, Timing], num_bytes: int) -> CandidateMeasurement:
    now = found["now"]
    call, slower = now.call_s, now.ratio
    faster = (1 / slower.value, 1 / slower.high, 1 / slower.low) if slower is not None else (1.0, 0.0, float("inf"))
    return CandidateMeasurement((call.value, call.low, call.high), faster, len(now.samples_s), num_bytes)


def lost(original: MetricScore, now: MetricScore, *, is_cost: bool) -> tuple[float, tuple[float, float] | None]:
    """What of the metric went, positive where it is worse, and the 95 % interval of that where samples can be paired.

    >>> lost(MetricScore(0.9), MetricScore(0.75), is_cost=False)[0] == 0.9 - 0.75
    True
    """
    better, worse = (now, original) if is_cost else (original, now)
    if better.samples is None or worse.samples is None or len(better.samples) < FEWEST:
        return better.value - worse.value, None
    if not all(map(math.isfinite, (*better.samples, *worse.samples))):
        return math.nan, None
    found = paired_difference(better.samples, worse.samples)
    return found.value, (found.low, found.high)
