"""Seconds and bytes of a subject, beside those of the model as it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flatout.levers.subjects import Subject
from flatout.measure.timer import Timing, compare
from flatout.records.shrinking import Range
from flatout.shrinking.training import Training


class Measured(NamedTuple):
    """As in a Point."""

    call_s: Range
    faster: Range
    num_pairs: int
    num_bytes: int


def of_calls(subject: Subject, given: Subject, *, seconds: float) -> Measured:
    """Calls with the inputs of each, in inference mode, in turn with those of the given model for about `seconds`."""
    device = next((p.device for p in given.model.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        found = compare(
            {
                "given": lambda: given.call(*given.inputs),
                "now": subject.timed or (lambda: subject.call(*subject.inputs)),
            },
            device=device,
            min_time_s=seconds / 2,
            max_time_s=seconds,
        )
    return _measured(found, subject.num_bytes)


def of_steps(now: Training, given: Training, *, seconds: float) -> Measured:
    """Steps of training on one batch, in turn with those of the given model."""
    steps: dict[str, Callable[[], object]] = {"given": given.step, "now": now.step}
    found = compare(steps, device=now.device, min_time_s=seconds / 2, max_time_s=seconds)
    return _measured(found, now.num_bytes)


def _measured(found: dict[str, Timing], num_bytes: int) -> Measured:
    now = found["now"]
    call = now.call_s
    slower = now.ratio
    faster = (1 / slower.value, 1 / slower.high, 1 / slower.low) if slower is not None else (1.0, 0.0, float("inf"))
    return Measured((call.value, call.low, call.high), faster, len(now.samples_s), num_bytes)
