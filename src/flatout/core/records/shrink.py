"""What was tried to make a model cheaper, what each composition costs and gives, and which one was selected."""

from __future__ import annotations

from typing import Final, Literal

from flatout.core.records.record import Record
from flatout.core.records.reduction import AppliedReduction, Option
from flatout.core.records.verdict import Verdict

Objective = Literal["latency", "memory", "train-cost"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("latency", "memory", "train-cost")

Range = tuple[float, float, float]
"""(median or mean, low, high): an estimate and its 95 % interval."""


class Point(Record, frozen=True, kw_only=True):
    """A composition of reductions, made and measured.

    `call_s` are seconds of one call (of one step of training where that is the objective), `faster` how many times faster than
    the original model's, in pairs run in turn, from which `call_s` follows. `num_bytes` are those of the weights (of weights,
    gradients and the optimizer's state where training is the objective). `metric` is the user's; `lost` what of it went, in its
    own unit, positive where it is worse, with an interval where the metric comes sample by sample.
    """

    name: str
    reductions: tuple[AppliedReduction, ...] = ()
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
    notes: tuple[str, ...] = ()
    """What the reductions said of themselves."""


class Untried(Record, frozen=True, kw_only=True):
    """A composition of which there is no point, and why."""

    name: str
    because: str


class Where(Record, frozen=True, kw_only=True):
    """What it was measured on; `device` is a GPU's name, or ''."""

    processor: str = ""
    device: str = ""
    torch: str = ""
    num_threads: int = 1


class Tried(Record, frozen=True, kw_only=True):
    """What came of a composition: a point or why there is none; and what could come next."""

    point: Point | None = None
    because: str = ""
    options: tuple[Option, ...] = ()
    refused: tuple[Untried, ...] = ()
    """Why reductions do not apply."""
    where: Where = Where()


class Shrunk(Record, frozen=True, kw_only=True):
    """All that `flatout shrink` found; the first point is the original model."""

    model: str
    objective: Objective
    allowed_loss: float
    """Of the metric, in its own unit."""
    is_cost: bool
    """Whether less of the metric is better."""
    points: tuple[Point, ...]
    untried: tuple[Untried, ...] = ()
    pareto: tuple[str, ...] = ()
    """Names of the points that no other beats in time, bytes and metric at once."""
    selected: str
    because: str
    verdict: Verdict
    where: Where = Where()

    @property
    def original(self) -> Point:
        """The model as it was given."""
        return self.points[0]

    @property
    def best(self) -> Point:
        """The point that was selected."""
        return next(point for point in self.points if point.name == self.selected)


class Order(Record, frozen=True, kw_only=True):
    """What a process of its own is asked to make of a model and to measure.

    `model`, `data`, `metric` and `loss` are names, module:function; `keep` is a folder in which processes leave trained weights
    for one another, `out` one to write the result to ('' for none).
    """

    model: str
    metric: str
    data: str = ""
    loss: str = ""
    root: str = ""
    composition: tuple[Option, ...] = ()
    objective: Objective = "latency"
    allowed_loss: float = 0.0
    is_cost: bool = False
    recovery_s: float = 60.0
    num_steps: int = 0
    learning_rate: float = 1e-3
    seed: int = 0
    num_threads: int = 0
    trial_s: float = 3.0
    keep: str = ""
    out: str = ""
    allow_pickle: bool = False
    is_check: bool = False
    """Whether it is only asked if the model could be written to `out`."""
