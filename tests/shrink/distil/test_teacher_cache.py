"""A teacher's answers on disk: the same as the teacher's, and refused where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.plain_models import plain
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, UsageError
from flatout.shrink.distil.losses import logit_loss
from flatout.shrink.distil.samples import Batch, Shuffled
from flatout.shrink.distil.teacher_cache import TeacherCache, write_teacher_cache
from flatout.shrink.distil.teachers import DistilObjective, LiveTeacher


@pytest.fixture
def teacher() -> nn.Module:
    return plain("mlp", width=16).module.eval()


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(50, 64, generator=torch.Generator().manual_seed(0))


def batch_of(inputs: Tensor) -> Batch:
    return next(Shuffled(inputs, batch_size=8).epoch(0))


def test_a_cache_says_what_the_teacher_says(tmp_path: Path, teacher: nn.Module, inputs: Tensor) -> None:
    cache = write_teacher_cache(tmp_path / "cache", teacher.train(), inputs, batch_size=50)
    assert teacher.training
    again = TeacherCache(tmp_path / "cache", teacher=teacher)
    batch, outputs = batch_of(inputs), torch.randn(8, 10)
    teacher.eval()
    for one in (cache, again):
        torch.testing.assert_close(
            one.loss(outputs, batch, DistilObjective()), LiveTeacher(teacher).loss(outputs, batch, DistilObjective())
        )
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


def test_the_likeliest_classes_take_less_room_and_bound_the_loss(
    tmp_path: Path, teacher: nn.Module, inputs: Tensor
) -> None:
    cache = write_teacher_cache(tmp_path / "cache", teacher, inputs, top=3, temperature=4.0, dtype=torch.float16)
    batch, outputs = batch_of(inputs), torch.randn(8, 10)
    assert isinstance(batch.inputs, Tensor)
    whole = logit_loss(outputs, teacher(batch.inputs), temperature=4.0)
    assert 0 < cache.loss(outputs, batch, DistilObjective(temperature=4.0)) <= whole
    assert cache.index.files["values.bin"].num_bytes == 50 * 3 * 2
    with pytest.raises(UsageError, match="temperature"):
        cache.loss(outputs, batch, DistilObjective(temperature=2.0))


def test_another_teacher_is_refused(tmp_path: Path, teacher: nn.Module, inputs: Tensor) -> None:
    write_teacher_cache(tmp_path / "cache", teacher, inputs)
    with torch.no_grad():
        next(teacher.parameters())[0, 0] += 1e-3
    with pytest.raises(UsageError, match="written by teacher"):
        TeacherCache(tmp_path / "cache", teacher=teacher)


def test_other_data_are_refused_by_the_sample(tmp_path: Path, teacher: nn.Module, inputs: Tensor) -> None:
    cache = write_teacher_cache(tmp_path / "cache", teacher, inputs)
    batch = batch_of(inputs)
    assert isinstance(batch.inputs, Tensor) and batch.ids is not None
    batch.inputs[3, 0] += 1e-3
    with pytest.raises(UsageError, match=f"sample {int(batch.ids[3])} "):
        cache.loss(torch.randn(8, 10), batch, DistilObjective())
    with pytest.raises(UsageError, match="no ids"):
        cache.loss(torch.randn(8, 10), Batch(batch.inputs), DistilObjective())
    with pytest.raises(UsageError, match="ids go from"):
        cache.loss(torch.randn(8, 10), batch._replace(ids=batch.ids + 50), DistilObjective())


def test_a_damaged_cache_is_refused(tmp_path: Path, teacher: nn.Module, inputs: Tensor) -> None:
    write_teacher_cache(tmp_path / "cache", teacher, inputs)
    with (tmp_path / "cache" / "outputs.bin").open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        TeacherCache(tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"no teacher\.json"):
        TeacherCache(tmp_path / "nothing")


def test_a_cache_that_could_not_be_finished_is_not_there(tmp_path: Path, inputs: Tensor) -> None:
    class Stops(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return x

    with pytest.raises(KeyboardInterrupt):
        write_teacher_cache(tmp_path / "cache", Stops(), inputs, batch_size=10)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_not_written_over(tmp_path: Path, teacher: nn.Module, inputs: Tensor) -> None:
    write_teacher_cache(tmp_path / "cache", teacher, inputs)
    with pytest.raises(UsageError, match="is there already"):
        write_teacher_cache(tmp_path / "cache", teacher, inputs)
