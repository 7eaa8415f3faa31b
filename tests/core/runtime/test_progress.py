"""Telling how far an observation has come costs next to nothing."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Mode, Schedule, doing_in
from flatout.core.records.progress import Progress
from flatout.core.records.record import from_json
from flatout.core.runtime.progress import ProgressFile


class Counting(ProgressFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.told: list[str] = []

    def write(self, doing: str, **figures: object) -> None:  # type: ignore[override]
        self.told.append(doing)
        super().write(doing, **figures)  # type: ignore[arg-type]


def observe(progress: ProgressFile, steps: int) -> None:
    capture = Capture(
        command=("test",),
        cwd=".",
        schedule=Schedule(trials_budget_s=0.0),
        machine=None,
        propose=lambda _: (),
        progress=progress,
    )
    capture.start()
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    capture.finish(exit="finished", exit_code=0)


@pytest.mark.slow
def test_many_short_steps_are_told_of_a_few_times_only(tmp_path: Path) -> None:
    progress = Counting(tmp_path / "progress.json")
    began = perf_counter()

    observe(progress, 300)

    assert progress.told[0] == "waiting for a step"
    assert len(progress.told) <= 2 + (perf_counter() - began) / 0.5


def test_the_last_word_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    progress = ProgressFile(path)

    progress.write("timing", num_steps=12, left_s=3.0)

    assert from_json(path.read_bytes(), Progress) == Progress(doing="timing", num_steps=12, left_s=3.0)
    assert not progress.is_due(perf_counter())
    assert progress.is_due(perf_counter() + 1.0)


@pytest.mark.slow
def test_a_folder_that_is_gone_ends_the_telling_and_nothing_else(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "gone" / "progress.json")

    observe(progress, 20)

    assert not progress.is_due(perf_counter() + 10.0)


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_a_name(mode: Mode) -> None:
    assert doing_in(mode, has_looked=False)
