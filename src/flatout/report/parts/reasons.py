"""What a predicted step is made of, in words, and in what one layout's step differs from another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from flatout.core import units
from flatout.core.records.scale import Ranked, StepTime

_LEAST_SHARE: Final = 0.005
"""Of a step, what is not worth its words."""


class StepPart(NamedTuple):
    """How a part of a step is named, and drawn by a class of the page's style."""

    label: str
    style: str


STEP_PARTS: Final[Mapping[str, StepPart]] = {
    "compute_s": StepPart("compute", "bg-compute"),
    "tensor_s": StepPart("tensor communication", "bg-communication"),
    "context_s": StepPart("context communication", "bg-transfer"),
    "expert_s": StepPart("expert communication", "bg-data"),
    "data_s": StepPart("data communication", "bg-overhead"),
    "offload_s": StepPart("offload", "bg-hot"),
    "bubble_s": StepPart("bubble", "bubble-ground"),
    "straggler_s": StepPart("waiting for the slowest rank", "bg-bandwidth"),
    "host_s": StepPart("waiting for the host", "bg-open"),
    "optimizer_s": StepPart("update", "bg-optimizer"),
    "step_s": StepPart("loop", "bg-capacity"),
}
"""By the field of StepTime, in the order in which they are drawn.

Communication is what is exposed; compute has what is computed again.
"""


class Spent(NamedTuple):
    """A part of one step."""

    part: StepPart
    seconds: float


def spent(step: StepTime) -> tuple[Spent, ...]:
    """The parts in the order of STEP_PARTS; parts that take nothing too."""
    return tuple(Spent(part, getattr(step, name)) for name, part in STEP_PARTS.items())


def where_it_goes(step: StepTime) -> str:
    """The parts that take most of a step, the largest first, each with its fraction of it.

    >>> parts = dict(host_s=0.0, tensor_s=1.0, data_s=0.0, optimizer_s=0.01, step_s=0.0)
    >>> where_it_goes(StepTime(total_s=10.0, compute_s=8.0, bubble_s=0.99, **parts))
    'compute 80 %, tensor communication 10 %, bubble 9.9 %'
    """
    largest = sorted(spent(step), key=lambda one: -one.seconds)
    return ", ".join(
        f"{one.part.label} {units.percent(one.seconds / step.total_s)}"
        for one in largest
        if one.seconds >= _LEAST_SHARE * step.total_s
    )


def difference(step: StepTime, against: StepTime) -> str:
    """Name the parts that take more, or less, the largest first; '' when none differs by half a percent of the step."""
    changes = [
        (mine.part.label, mine.seconds - other.seconds) for mine, other in zip(spent(step), spent(against), strict=True)
    ]
    worth = [change for change in changes if abs(change[1]) >= _LEAST_SHARE * against.total_s]
    worth.sort(key=lambda change: -abs(change[1]))
    return ", ".join(f"{label} {'+' if s > 0 else '-'}{units.duration(abs(s))}" for label, s in worth[:3])


def num_alike(ranked: Sequence[Ranked]) -> int:
    """Layouts, the first too, whose interval meets the first's: which of them is fastest is not known."""
    return sum(one.low_s <= ranked[0].high_s for one in ranked)
