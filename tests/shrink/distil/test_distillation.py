"""Students that come near their teachers, on real data, over rollouts, from a cache, and after a stop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.plain_models import plain
from tests.plain_tasks import Task, digits
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.distil.distillation import HeldOut, Length, Recipe, distil
from flatout.shrink.distil.features import Features
from flatout.shrink.distil.rollouts import Rollout
from flatout.shrink.distil.samples import Batch, Shuffled
from flatout.shrink.distil.scoring import accuracy, negative_bits, negative_error, scores_of
from flatout.shrink.distil.teacher_cache import write_teacher_cache
from flatout.shrink.distil.teachers import DistilObjective
from flatout.shrink.search.slicing import inherit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task() -> Task:
    return digits(is_image=False)


@pytest.fixture(scope="module")
def trained(task: Task) -> nn.Module:
    model = plain("mlp", width=64).module
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(12):
        for batch in Shuffled(task.x, task.y, batch_size=64).epoch(epoch):
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def half(trained: nn.Module) -> nn.Module:
    student = plain("mlp", width=32, seed=1).module
    inherit(student, trained)
    return student


def test_half_the_width_comes_back_to_within_a_percent(task: Task, trained: nn.Module) -> None:
    found = distil(
        half(trained),
        trained,
        Shuffled(task.x, task.y, batch_size=64),
        length=Length(epochs=15),
        held_out=HeldOut(task.held_x, task.held_y),
    )
    report = found.report
    assert report.score is not None and report.teacher_score is not None and report.difference is not None
    assert report.score.value >= report.teacher_score.value - 0.01
    assert report.difference.low <= report.difference.value <= report.difference.high
    assert report.before is not None and report.before.value < report.score.value
    assert report.num_steps == 15 * (1200 // 64) and report.history[-1].step == report.num_steps
    assert report.history[-1].soft < report.history[0].soft


def test_global_random_numbers_modes_and_the_teacher_are_left_as_they_were(task: Task, trained: nn.Module) -> None:
    before, weights = torch.get_rng_state(), copy.deepcopy(trained.state_dict())
    student = half(trained).eval()
    distil(student, trained, Shuffled(task.x, task.y, batch_size=64), length=Length(steps=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert not student.training and not trained.training
    assert all(torch.equal(value, weights[name]) for name, value in trained.state_dict().items())
    assert all(p.grad is None for p in trained.parameters())


class StopAt:
    """Batches that end the process's work at one of them, as a kill does."""

    def __init__(self, batches: Shuffled, at: int) -> None:
        self._batches, self._left = batches, at

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int) -> Iterator[Batch]:
        for batch in self._batches.epoch(number):
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
            yield batch


def with_dropout(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, task: Task, trained: nn.Module) -> None:
    batches = Shuffled(task.x, task.y, batch_size=100)
    options = {"length": Length(epochs=3), "seed": 5}
    whole = distil(with_dropout(0), trained, batches, **options).student  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        stopped = StopAt(batches, 17)
        distil(with_dropout(0), trained, stopped, folder=tmp_path, save_every_s=0.0, **options)  # type: ignore[arg-type]
    again = distil(with_dropout(1), trained, batches, folder=tmp_path, save_every_s=60.0, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.student.parameters(), strict=True))
    assert again.report.num_steps == 36
    steps = [point.step for point in again.report.history]
    assert steps == sorted(set(steps)) and steps[-1] == 36


def test_a_cache_teaches_as_the_teacher_does(tmp_path: Path, task: Task, trained: nn.Module) -> None:
    batches, length = Shuffled(task.x, task.y, batch_size=64), Length(steps=5)
    cache = write_teacher_cache(tmp_path / "cache", trained, task.x, batch_size=len(task.x))
    live, read = half(trained), half(trained)
    distil(live, trained, batches, length=length)
    report = distil(read, cache, batches, length=length).report
    for a, b in zip(live.parameters(), read.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert report.teacher_parameters is None


def test_features_are_drawn_near_and_their_hooks_taken_off(task: Task, trained: nn.Module) -> None:
    student = half(trained)
    features = Features(student, trained, {"3": "3"}, inputs=task.x[:2])
    assert features.projections["0"].weight.shape == (64, 32)
    report = distil(
        student,
        trained,
        Shuffled(task.x, task.y, batch_size=64),
        length=Length(epochs=4),
        features=features,
    ).report
    assert report.history[-1].feature < 0.5 * report.history[0].feature
    assert not any(m._forward_hooks for model in (student, trained) for m in model.modules())


def test_attention_is_drawn_near_between_layers_of_any_width() -> None:
    teacher, student = plain("cnn", width=8).module, plain("cnn", width=4, seed=1).module
    x = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    features = Features(student, teacher, {"inner": "inner", "down": "down"}, inputs=x[:2], kind="attention")
    assert len(features.projections) == 0
    report = distil(student, teacher, Shuffled(x, batch_size=16), length=Length(epochs=30), features=features).report
    assert report.history[-1].feature < 0.7 * report.history[0].feature


def test_paths_that_are_not_there_or_not_called_are_refused(trained: nn.Module, task: Task) -> None:
    for pairs in ({"9": "3"}, {"3": "9"}, {}):
        with pytest.raises(UsageError):
            Features(half(trained), trained, pairs, inputs=task.x[:2])
    odd = nn.ModuleDict({"used": nn.Linear(64, 10), "idle": nn.Linear(2, 2)})
    odd.forward = odd["used"].forward  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="was not called"):
        Features(odd, trained, {"idle": "3"}, inputs=task.x[:2])


@pytest.mark.parametrize("name", ["gru_step", "lstm_step"])
def test_carried_states_are_distilled_over_rollouts(name: str) -> None:
    wide, narrow = plain(name, width=16), plain(name, width=8, seed=1)
    x = torch.randn(64, 6, 16, generator=torch.Generator().manual_seed(0))
    teacher, student = Rollout(wide.module, wide.inputs[1:]), Rollout(narrow.module, narrow.inputs[1:], cut=4)
    with torch.no_grad():
        y = teacher(x)
    before = sum(scores_of(student, x, y, score=negative_error))
    objective = DistilObjective(soft=F.mse_loss, hard=F.mse_loss)
    found = distil(
        student,
        teacher,
        Shuffled(x, batch_size=32),
        length=Length(epochs=40),
        objective=objective,
        recipe=Recipe(rate=1e-2),
    )
    assert sum(scores_of(found.student, x, y, score=negative_error)) > 0.2 * before
    state = [s[:1] for s in wide.inputs[1:]]
    rows = []
    for t in range(6):
        out, *state = wide.module(x[:1, t], *state)
        rows.append(out)
    torch.testing.assert_close(torch.stack(rows, 1), y[:1])


def test_a_step_that_keeps_its_state_to_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="gives 0"):
        Rollout(_Forgetful(), (torch.zeros(1, 2),))(torch.zeros(1, 3, 2))
    with pytest.raises(UsageError):
        Rollout(_Forgetful(), ())


class _Forgetful(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor]:
        return (x + h,)


def test_lengths_and_models_that_make_no_sense_are_refused(task: Task, trained: nn.Module) -> None:
    batches = Shuffled(task.x, task.y, batch_size=64)
    for length in (Length(), Length(epochs=1, steps=1), Length(seconds=0.0)):
        with pytest.raises(UsageError, match="exactly one"):
            distil(half(trained), trained, batches, length=length)
    with pytest.raises(UsageError, match="is a parameter of the student"):
        distil(trained, trained, batches, length=Length(steps=1))
    with pytest.raises(UsageError, match="nothing to train"):
        distil(half(trained).requires_grad_(False), trained, batches, length=Length(steps=1))
    with pytest.raises(UsageError, match="a batch is"):
        distil(half(trained), trained, [torch.zeros(2, 64)], length=Length(steps=1))


def test_a_length_in_seconds_ends_by_the_clock_and_lists_of_batches_will_do(task: Task, trained: nn.Module) -> None:
    batches = [(task.x[:32], task.y[:32]), (task.x[32:64], task.y[32:64])]
    report = distil(half(trained), trained, batches, length=Length(seconds=0.3)).report
    assert report.num_steps > 2 and report.seconds >= 0.3


def test_scores_are_one_number_a_sample_and_ignored_places_do_not_count() -> None:
    outputs = torch.tensor([[[2.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [2.0, 0.0]]])
    targets = torch.tensor([[0, -100], [0, 1]])
    assert accuracy(outputs, targets).tolist() == [1.0, 0.5]
    exact = -F.cross_entropy(outputs[0, :1], targets[0, :1]) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(negative_bits(outputs, targets)[0], exact)
