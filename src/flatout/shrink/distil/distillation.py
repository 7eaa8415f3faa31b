"""A student trained after its teacher, in one call that can be killed and begun again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from flatout.blocks.training.checkpoints import Checkpoints
from flatout.blocks.training.schedules import set_rate, warm_up_cosine
from flatout.blocks.training.snapshot import random_state, set_random_state
from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import DistilPoint, DistilReport
from flatout.shrink.distil.features import Features
from flatout.shrink.distil.samples import Batch, Batches, Inputs, as_tuple, batches_of_epoch
from flatout.shrink.distil.scoring import Score, accuracy, scores_of
from flatout.shrink.distil.teachers import DistilObjective, LiveTeacher, Teacher, output_of
from flatout.shrink.module_mode import in_mode
from flatout.shrink.score_intervals import mean_interval, paired_difference

_CURVE: Final = 10_000
"""Steps that the schedule is drawn over; where the run is on it comes from steps done, or from time."""
_NUM_POINTS: Final = 20


class HeldOut(NamedTuple):
    """Samples that are not trained on, and how an answer to each is scored (higher is better)."""

    inputs: Inputs
    targets: Tensor
    score: Score = accuracy
    batch_size: int = 256


class Length(NamedTuple):
    """How long to train: exactly one of the three. `seconds` ends by the clock, and gives other weights each time."""

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None


class Recipe(NamedTuple):
    """AdamW with a cosine schedule. Weight decay is for tensors of two or more dimensions."""

    rate: float = 2e-3
    weight_decay: float = 0.01
    warm_up_fraction: float = 0.05
    floor_fraction: float = 0.01
    max_norm: float | None = 1.0


_OBJECTIVE: Final = DistilObjective()
_RECIPE: Final = Recipe()


class Distilled(NamedTuple):
    """The student, trained in place and in the modes it was given in, and the report of it."""

    student: nn.Module
    report: DistilReport


def distil(
    student: nn.Module,
    teacher: nn.Module | Teacher,
    batches: Batches,
    *,
    length: Length,
    held_out: HeldOut | None = None,
    objective: DistilObjective = _OBJECTIVE,
    features: Features | None = None,
    recipe: Recipe = _RECIPE,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every_s: float = 20.0,
    on_progress: Callable[[DistilPoint], None] | None = None,
) -> Distilled:
    """Train `student` in place to answer as `teacher` does.

    `teacher` is a model on the same device, which runs beside the student, or a `TeacherCache`. All parameters of the student
    that require gradients are trained. The order of an epoch is that of `batches`; `seed` starts what the student itself draws
    (dropout); the global random numbers are put back. With `folder` the state is saved every `save_every_s`, and a call that
    finds one goes on from there: with `Shuffled` batches and a length in epochs or steps, to the weights of a run that was not
    stopped, bit for bit. `on_progress` gets each point of the history when it is known. Weights are left as trained last.

    Raises UsageError for arguments that contradict one another. A loss that is not finite is not caught: it is in the history.
    """
    clock = _TrainingClock(length, len(batches))
    run = _DistilRun(student, _teacher(student, teacher), objective.checked(), features, recipe, clock, on_progress)
    before = _scores(student, held_out)
    module = run.teacher.module if isinstance(run.teacher, LiveTeacher) else None
    numbers = random_state()
    torch.manual_seed(seed)
    try:
        with ExitStack() as stack:
            stack.enter_context(in_mode(student, is_training=True))
            if module is not None:
                stack.enter_context(in_mode(module, is_training=False))
            if features is not None:
                stack.callback(features.remove)
                features.install()
            run.train(batches, Path(folder) if folder is not None else None, save_every_s)
    finally:
        set_random_state(numbers)
    scores, teacher_scores = _scores(student, held_out), _scores(module, held_out)
    report = DistilReport(
        num_steps=run.step,
        seconds=run.elapsed_s,
        seed=seed,
        num_parameters=sum(p.numel() for p in student.parameters()),
        teacher_parameters=sum(p.numel() for p in module.parameters()) if module is not None else None,
        history=tuple(run.history),
        before=mean_interval(before) if before else None,
        score=mean_interval(scores) if scores else None,
        teacher_score=mean_interval(teacher_scores) if teacher_scores else None,
        difference=paired_difference(scores, teacher_scores) if scores and teacher_scores else None,
    )
    return Distilled(student, report)


def _scores(model: nn.Module | None, held_out: HeldOut | None) -> list[float] | None:
    if model is None or held_out is None:
        return None
    return scores_of(model, held_out.inputs, held_out.targets, score=held_out.score, batch_size=held_out.batch_size)


class _TrainingClock:
    """How much of the training is done."""

    def __init__(self, length: Length, num_batches: int) -> None:
        set_values = [value for value in length if value is not None]
        if len(set_values) != 1 or not set_values[0] > 0:
            raise UsageError(f"{length}: give exactly one of epochs, steps and seconds, above 0")
        if not num_batches:
            raise UsageError("there are no batches; give one at least")
        self._seconds, self._steps = length.seconds, length.steps
        if length.epochs is not None:
            self._steps = length.epochs * num_batches
        self._began, self._before = monotonic(), 0.0
        self.num_batches = num_batches

    def begin(self, elapsed_s: float) -> None:
        """Go on after `elapsed_s` of an earlier call."""
        self._began, self._before = monotonic(), elapsed_s

    @property
    def elapsed_s(self) -> float:
        return self._before + monotonic() - self._began

    def fraction(self, step: int) -> float:
        """Done before this step; 1 or more: it is over."""
        if self._steps is not None:
            return step / self._steps
        assert self._seconds is not None
        return self.elapsed_s / self._seconds


class _DistilRun:
    """The loop, and what it adds up."""

    def __init__(
        self,
        student: nn.Module,
        teacher: Teacher,
        objective: DistilObjective,
        features: Features | None,
        recipe: Recipe,
        clock: _TrainingClock,
        on_progress: Callable[[DistilPoint], None] | None,
    ) -> None:
        self.student, self.teacher, self.clock = student, teacher, clock
        self._objective, self._features, self._recipe, self._on_progress = objective, features, recipe, on_progress
        self._trained = [p for p in student.parameters() if p.requires_grad]
        if not self._trained:
            raise UsageError("no parameter of the student requires a gradient; there is nothing to train")
        self._all = [*self._trained, *(features.parameters() if features is not None else ())]
        self._optimizer = torch.optim.AdamW(_groups(self._all, recipe.weight_decay), lr=recipe.rate, foreach=True)
        warm_up = round(recipe.warm_up_fraction * _CURVE)
        self._rate = warm_up_cosine(
            recipe.rate, warm_up=warm_up, steps=_CURVE, floor=recipe.rate * recipe.floor_fraction
        )
        self._sums = _LossSums()
        self.history: list[DistilPoint] = []
        self.step, self.elapsed_s = 0, 0.0

    def train(self, batches: Batches, folder: Path | None, save_every_s: float) -> None:
        if folder is None:
            self._loop(batches, None, save_every_s)
            return
        with Checkpoints(folder) as saves:
            parts = {"student": self.student, "optimizer": self._optimizer, "progress": self}
            if self._features is not None:
                parts["features"] = self._features.projections
            found = saves.load(**parts)
            self._loop(batches, lambda: saves.save(self.step, **parts), save_every_s)
            if self.step != found:
                saves.save(self.step, **parts)

    def _loop(self, batches: Batches, save: Callable[[], None] | None, save_every_s: float) -> None:
        self.clock.begin(self.elapsed_s)
        saved_s, point = self.clock.elapsed_s, self.clock.fraction(self.step)
        rate = self._recipe.rate
        for batch in self._from_here(batches):
            fraction = self.clock.fraction(self.step)
            if fraction >= 1:
                break
            rate = self._rate(int(fraction * _CURVE))
            self._update(batch, rate)
            self.step += 1
            if self.clock.fraction(self.step) >= point + 1 / _NUM_POINTS:
                point = self.clock.fraction(self.step)
                self._keep_point(rate)
            if save is not None and self.clock.elapsed_s - saved_s >= save_every_s:
                save()
                saved_s = self.clock.elapsed_s
        self.elapsed_s = self.clock.elapsed_s
        if self._sums.num:
            self._keep_point(rate)

    def _from_here(self, batches: Batches) -> Iterator[Batch]:
        epoch, done = divmod(self.step, self.clock.num_batches)
        while True:
            yield from islice(batches_of_epoch(batches, epoch), done, None)
            epoch, done = epoch + 1, 0

    def _update(self, batch: Batch, rate: float) -> None:
        outputs = output_of(self.student(*as_tuple(batch.inputs)))
        objective = self._objective
        soft = self.teacher.loss(outputs, batch, objective)
        hard = objective.of_targets(outputs, batch.targets)
        share = objective.soft_fraction if batch.targets is not None else 1.0
        feature = self._features.loss() if self._features is not None else outputs.new_zeros(())
        loss = share * soft + (1 - share) * hard + objective.feature_weight * feature
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._recipe.max_norm is not None:
            nn.utils.clip_grad_norm_(self._all, self._recipe.max_norm)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._sums.add(loss, soft, hard, feature)

    def _keep_point(self, rate: float) -> None:
        means = dict(zip(("loss", "soft", "hard", "feature"), self._sums.means(), strict=True))
        self.history.append(DistilPoint(step=self.step, rate=rate, elapsed_s=self.clock.elapsed_s, **means))
        if self._on_progress is not None:
            self._on_progress(self.history[-1])

    def state_dict(self) -> dict[str, Any]:
        """Steps, time and history, as a part of a checkpoint."""
        points = [list(msgspec.structs.astuple(point)) for point in self.history]
        sums = {"sums": self._sums.total, "num": self._sums.num}
        return {"step": self.step, "elapsed_s": self.clock.elapsed_s, "points": points, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        fields = DistilPoint.__struct_fields__
        self.history[:] = [DistilPoint(**dict(zip(fields, point, strict=True))) for point in state["points"]]
        self._sums.total, self._sums.num = state["sums"], state["num"]


class _LossSums:
    """Sums of losses since the last point, on their device: the host waits once a point."""

    def __init__(self) -> None:
        self.total, self.num = torch.zeros(4), 0

    def add(self, *losses: Tensor) -> None:
        now = torch.stack([loss.detach().float() for loss in losses])
        self.total, self.num = self.total.to(now.device) + now, self.num + 1

    def means(self) -> list[float]:
        found = (self.total / self.num).tolist()
        self.total, self.num = torch.zeros(4), 0
        return found


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    kinds = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return [
        {"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (weight_decay, 0.0), strict=True) if kind
    ]


def _teacher(student: nn.Module, teacher: nn.Module | Teacher) -> Teacher:
    if not isinstance(teacher, nn.Module):
        return teacher
    own = {id(p) for p in student.parameters()}
    shared = [name for name, p in teacher.named_parameters() if id(p) in own]
    if shared:
        raise UsageError(f"'{shared[0]}' of the teacher is a parameter of the student, too; give a copy of one of them")
    return LiveTeacher(teacher)
