"""What a search of architectures, or the training of a student, found: every trial, what was measured, and the intervals."""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record

SpaceValue = int | float | str | bool
"""What one name of a search space was given."""
State = Literal["finished", "stopped", "over the limit", "failed"]
"""`stopped`: trained for a part, and worse than the others were by then. `failed`: it ended the process that ran it, twice."""


class Interval(Record, frozen=True, kw_only=True):
    """A mean, or a difference of means, with its interval; `method` says which."""

    value: float
    low: float
    high: float
    confidence: float
    num_samples: int
    method: str


class Cost(Record, frozen=True, kw_only=True):
    """Cost of one call of a model. What the limit does not ask for and what was not measured is None."""

    num_parameters: int
    work_flop: int | None = None
    peak_bytes: int | None = None
    """Weights and buffers, and the most that lives at once beside them in a call; workspaces inside operators are not seen."""
    latency_s: tuple[float, float, float] | None = None
    """Median, and its interval."""
    latency_fraction: tuple[float, float, float] | None = None
    """Of the original model's latency, measured beside it in the same rounds: median of the ratios, and its interval."""


class ArchitectureTrial(Record, frozen=True, kw_only=True):
    """One choice of the space, and what became of it."""

    number: int
    architecture: dict[str, SpaceValue]
    state: State
    why: str = ""
    cost: Cost | None = None
    score: float | None = None
    """Mean over the samples that the search judges by; of the last round that was trained."""
    num_rounds: int = 0
    train_s: float = 0.0
    inherited_fraction: float = 0.0
    """Numbers of the candidate's weights that the original model's were put in."""


class SearchReport(Record, frozen=True, kw_only=True):
    """A whole search. Scores are means, higher is better."""

    limit: dict[str, float]
    original: Cost
    original_score: Interval
    """On the samples of the proof."""
    original_search_score: float
    """On those that the search judges by, as the scores of the trials are."""
    trials: tuple[ArchitectureTrial, ...]
    pareto: tuple[int, ...]
    """Numbers of the finished trials that no other beats in score and cost, cheapest first."""
    winner: int | None = None
    winner_cost: Cost | None = None
    """Measured anew, longer than in the search."""
    winner_score: float | None = None
    """Of the model that is returned, on the samples of the proof, as those below."""
    seed_scores: tuple[float, ...] = ()
    """Of the winner trained anew with other seeds; the model that is returned is one of them."""
    difference: Interval | None = None
    """The model that is returned less the given one, paired by sample."""
    seed_difference: Interval | None = None
    """Mean over the seeds less the given one, paired by sample."""
    allowed_loss: float = 0.0
    is_fresh: bool = False
    """Whether those samples are others than the search judged by."""
    spent_s: float = 0.0
    ended: str = ""

    @property
    def is_no_worse(self) -> bool:
        """Whether the whole interval of the difference lies above minus the allowed loss."""
        return self.difference is not None and self.difference.low >= -self.allowed_loss


class DistilPoint(Record, frozen=True, kw_only=True):
    """Means since the point before."""

    step: int
    loss: float
    soft: float
    """Against the teacher's outputs."""
    hard: float
    """Against the targets; 0 without."""
    feature: float
    rate: float
    elapsed_s: float


class DistilReport(Record, frozen=True, kw_only=True):
    """How a student was trained, and how it fares on held samples beside its teacher."""

    num_steps: int
    seconds: float
    seed: int
    num_parameters: int
    teacher_parameters: int | None = None
    """None when its outputs came from a cache."""
    history: tuple[DistilPoint, ...] = ()
    before: Interval | None = None
    """Score of the student before training."""
    score: Interval | None = None
    teacher_score: Interval | None = None
    difference: Interval | None = None
    """Student less teacher, paired by sample."""
