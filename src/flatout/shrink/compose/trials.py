"""Compositions built and measured in this process."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

import torch

from flatout.core.errors import FlatoutError
from flatout.core.records.reduction import KINDS, AppliedReduction, Option, Reduction, ReductionRefusal
from flatout.core.records.shrink import Objective, Point, Range, Tried, Untried, Where
from flatout.core.runtime.cache_folder import require_trusted_library
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import Timing, compare_times
from flatout.shrink.candidate import CandidateModel, MetricScore, ShrinkTask
from flatout.shrink.compose.explorer import Composition, composition_name
from flatout.shrink.compose.training import Training
from flatout.shrink.score_intervals import paired_difference

TRIAL_S: Final = 3.0
"""Of one comparison of times: 11 rounds at least where a call takes less than a tenth of a second."""
_FEWEST: Final = 30
"""Samples from which on an interval of the loss is computed."""


class TrialRunner:
    """Builds candidates from the original model, and measures them beside it. Trained ones are cached for what builds on them."""

    def __init__(
        self,
        original: CandidateModel,
        reductions: Iterable[Reduction],
        objective: Objective,
        *,
        seconds: float = TRIAL_S,
        keep: Path | None = None,
    ) -> None:
        """`reductions` are all there are, `seconds` what one comparison of times takes; `keep` is a folder for trained models."""
        self._reductions = {reduction.id: reduction for reduction in reductions}
        self._original, self._objective, self._seconds, self._keep = original, objective, seconds, keep
        self._score: MetricScore | None = None
        self._built: dict[str, CandidateModel] = {}

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        """The point, and what could come next; or why there is none. Errors that are not flatout's or torch's are raised."""
        task = replace(self._original.task, allowed_loss=allowed_loss)
        self._original = replace(self._original, task=task)
        try:
            return self._tried(composition, times * self._seconds)
        except (FlatoutError, RuntimeError) as e:  # of torch.compile, too
            answers = str(e).strip() or type(e).__name__
            return Tried(because=answers.splitlines()[0] if not isinstance(e, FlatoutError) else answers)

    def candidate(self, composition: Composition) -> CandidateModel:
        """The original model under these reductions, one after the other."""
        if not composition:
            return self._original
        name = composition_name(composition)
        if name not in self._built:
            *before, last = composition
            file = self._file(name)
            if file is not None and file.exists():
                require_trusted_library(file)  # a pickle: of our own folder, and of nobody else's
                model, inputs, notes, num_bytes = torch.load(file, weights_only=False)
                restored = self._original.with_model(model, "", inputs=inputs, num_bytes=num_bytes)
                self._built[name] = replace(restored, notes=notes)
                return self._built[name]
            reduction = self._reduction(last)
            built: CandidateModel = reduction.apply(self.candidate(tuple(before)), last.parameters)
            if reduction.kind not in ("size", "recovery", "bits"):
                return built
            # bits, too: which layers are faster in them is measured, and could come out otherwise
            self._built[name] = built
            if file is not None:
                beside = file.with_suffix(".part")
                torch.save((built.model, built.inputs, built.notes, built.num_bytes), beside)
                beside.replace(file)
        return self._built[name]

    def delivered(self, composition: Composition) -> CandidateModel:
        """The candidate with everything but what runs it, as it can be written to a file."""
        in_weights = tuple(option for option in composition if self._reduction(option).kind != "engine")
        if self._objective != "train-cost":
            return self.candidate(in_weights)
        candidate = self._copy(in_weights)
        Training(candidate).run(num_steps(candidate.task))
        return candidate

    def _file(self, name: str) -> Path | None:
        return None if self._keep is None else self._keep / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.pt"

    def _tried(self, composition: Composition, seconds: float) -> Tried:
        began = perf_counter()
        if self._objective == "train-cost":
            candidate, measured, score = self._trained(composition, seconds)
        else:
            candidate = self.candidate(composition)
            score = candidate.metric()
            measured = of_calls(candidate, self._original, seconds=seconds)
        if self._score is None:
            self._score = score if not composition else self._original.metric()
        value, interval = lost(self._score, score, is_cost=self._original.task.is_cost)
        point = Point(
            name=composition_name(composition),
            reductions=tuple(self._applied(option) for option in composition),
            call_s=measured.call_s,
            faster=measured.faster if composition else (1.0, 1.0, 1.0),
            num_pairs=measured.num_pairs,
            num_bytes=measured.num_bytes,
            num_parameters=sum(p.numel() for p in candidate.model.parameters()),
            metric=score.value,
            lost=value,
            lost_range=interval,
            seconds=perf_counter() - began,
            notes=candidate.notes,
        )
        answers = [*self._answers(candidate, composition)]
        return Tried(
            point=point,
            options=tuple(one for one in answers if isinstance(one, Option)),
            where=where() if not composition else Where(),
            refused=tuple(
                Untried(name=one.reduction, because=one.because) for one in answers if isinstance(one, ReductionRefusal)
            ),
        )

    def _trained(
        self, composition: Composition, seconds: float
    ) -> tuple[CandidateModel, CandidateMeasurement, MetricScore]:
        """Its steps timed beside the original model's, on copies; then trained for as many steps, on another, and judged."""
        timed, beside, candidate = self._copy(composition), self._copy(()), self._copy(composition)
        measured = of_steps(Training(timed), Training(beside), seconds=seconds)
        Training(candidate).run(num_steps(candidate.task))
        return candidate, measured, candidate.metric()

    def _copy(self, composition: Composition) -> CandidateModel:
        """The composition on weights of its own."""
        candidate = CandidateModel.of(copy.deepcopy(self._original.model), self._original.task)
        for option in composition:
            candidate = self._reduction(option).apply(candidate, option.parameters)
        return candidate

    def _applied(self, option: Option) -> AppliedReduction:
        reduction = self._reduction(option)
        return AppliedReduction(
            id=reduction.id, guarantee=reduction.guarantee, parameters=option.parameters, because=option.because
        )

    def _answers(self, candidate: CandidateModel, composition: Composition) -> Iterator[Option | ReductionRefusal]:
        """What reductions of later kinds than those that are there answer for the candidate."""
        last = max((KINDS.index(self._reduction(option).kind) for option in composition), default=-1)
        for reduction in self._reductions.values():
            kind = reduction.kind
            if KINDS.index(kind) > last and (kind == "training") == (self._objective == "train-cost"):
                yield from reduction.options(candidate)

    def _reduction(self, option: Option) -> Reduction:
        return self._reductions[option.reduction]


def num_steps(task: ShrinkTask) -> int:
    """Steps that training takes: the number asked for, else one pass over the batches."""
    assert task.batches is not None
    return task.num_steps or sum(1 for _ in task.batches())


def where() -> Where:
    """Processor, GPU and torch of this process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Where(
        processor=cpu_model(), device=device, torch=str(torch.__version__), num_threads=torch.get_num_threads()
    )


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
    if better.samples is None or worse.samples is None or len(better.samples) < _FEWEST:
        return better.value - worse.value, None
    if not all(map(math.isfinite, (*better.samples, *worse.samples))):
        return math.nan, None
    found = paired_difference(better.samples, worse.samples)
    return found.value, (found.low, found.high)
