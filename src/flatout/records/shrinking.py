"""What was tried to make a model cheaper, what each composition costs and gives, and which one was chosen."""

from __future__ import annotations

from typing import Final, Literal

from flatout.records.lever import Parameters, PlannedLever
from flatout.records.record import Record
from flatout.records.verdict import Verdict

Objective = Literal["latency", "memory", "train-cost"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("latency", "memory", "train-cost")

Kind = Literal["training", "size", "recovery", "bits", "engine"]
KINDS: Final[tuple[Kind, ...]] = ("training", "size", "recovery", "bits", "engine")
"""In the order in which they come into a composition, at most one of each."""

Range = tuple[float, float, float]
"""(median or mean, low, high): an estimate and its 95 % interval."""


class Offer(Record, frozen=True, kw_only=True):
    """One way to pull a lever on a model, and why it may help."""

    lever: str
    parameters: Parameters = {}
    because: str = ""


class Point(Record, frozen=True, kw_only=True):
    """A composition of levers, made and measured.

    `call_s` are seconds of one call (of one step of training where that is the objective), `faster` how many times faster than
    the given model's, in pairs run in turn. `num_bytes` are those of the weights (of weights, gradients and the optimizer's
    state where training is the objective). `metric` is the user's; `lost` what of it went, in its own unit, positive where it is
    worse: an interval where the metric comes sample by sample, otherwise None.
    """

    name: str
    levers: tuple[PlannedLever, ...] = ()
    call_s: Range
    faster: Range = (1.0, 1.0, 1.0)
    num_pairs: int = 0
    num_bytes: int
    num_parameters: int = 0
    metric: float
    lost: float = 0.0
    lost_range: tuple[float, float] | None = None
    seconds: float = 0.0
    """What making and measuring took."""
    told: tuple[str, ...] = ()
    """What the levers said of themselves."""


class Untried(Record, frozen=True, kw_only=True):
    """A composition of which there is no point, and why."""

    name: str
    because: str


class Shrunk(Record, frozen=True, kw_only=True):
    """All that `flatout shrink` found; the first point is the model as it was given."""

    model: str
    objective: Objective
    allowed_loss: float
    """Of the metric, in its own unit."""
    is_cost: bool
    """Whether less of the metric is better."""
    points: tuple[Point, ...]
    untried: tuple[Untried, ...] = ()
    front: tuple[str, ...] = ()
    """Names of the points that no other beats in time, bytes and metric at once."""
    chosen: str
    because: str
    verdict: Verdict
    processor: str = ""
    num_threads: int = 1

    @property
    def given(self) -> Point:
        """The model as it was given."""
        return self.points[0]

    @property
    def best(self) -> Point:
        """The chosen point."""
        return next(point for point in self.points if point.name == self.chosen)
