"""Trials are found in their folder, one for each request that a rule can make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, sleep

import pytest
import torch
from torch import nn

from flatout.check.observe.calls import RootModule
from flatout.check.trials import runner
from flatout.check.trials.context import Scene, TrialEntry
from flatout.check.trials.runner import run_trials, trials_by_request
from flatout.check.trials.time_limit import OutOfTime, time_limit
from flatout.core.records.record import from_json, to_json
from flatout.core.records.trial import TimeDataset, TimeModel, TimeOptimizer, Trial, TrialRequest, TrialResult

SCENE = Scene(
    examples=[],
    num_calls=[],
    outputs=[],
    roots=[],
    optimizers=[],
    loaders=[],
    unused_modules=(),
    device="cpu",
    limit_s=5.0,
)
ONE, OTHER = TimeOptimizer(optimizer=0), TimeDataset(loader=0)


def taking(monkeypatch: pytest.MonkeyPatch, run: Callable[[Trial, Scene], TrialResult]) -> None:
    """Have trials of both kinds do this."""
    entries = {kind: TrialEntry(kind, run) for kind in (TimeOptimizer, TimeDataset)}
    monkeypatch.setattr(runner, "trials_by_request", lambda: entries)


def endless(trial: Trial, scene: Scene) -> TrialResult:
    while True:
        with suppress(Exception):  # as user code may be
            sleep(0.005)


def test_a_trial_that_does_not_end_is_given_up_at_the_limit_and_the_next_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taking(monkeypatch, endless)
    began = perf_counter()

    one, other = run_trials([ONE, OTHER], SCENE, budget_s=0.5)

    assert perf_counter() - began < 5.0
    assert "given up" in one.refused
    assert "were spent" in other.refused


def test_what_changes_the_random_streams_is_undone_when_a_trial_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(trial: Trial, scene: Scene) -> TrialResult:
        torch.rand(1)
        return endless(trial, scene)

    taking(monkeypatch, drawing)
    before = torch.get_rng_state()

    run_trials([ONE], SCENE, budget_s=0.4)

    assert torch.equal(torch.get_rng_state(), before)


def test_in_a_hurry_no_trial_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    taking(monkeypatch, endless)

    [result] = run_trials([ONE], SCENE, budget_s=15.0, is_hurried=lambda: True)

    assert result.refused == "the script was ended"


def test_a_limit_that_is_not_reached_leaves_nothing_behind() -> None:
    with time_limit(0.05):
        pass
    sleep(0.1)  # where an interruption would come out

    with pytest.raises(OutOfTime), time_limit(0.05):
        while True:
            sleep(0.001)


@pytest.mark.parametrize(("call_s", "is_tried"), [(0.001, True), (4.0, False)], ids=["short", "long"])
def test_a_module_whose_calls_do_not_fit_into_the_time_is_not_called_at_all(call_s: float, is_tried: bool) -> None:
    module = nn.Linear(4, 4)
    root = RootModule(module, (0,), "Linear")
    root.strong_ref = module
    root.capture((torch.randn(2, 4),), {})
    root.note_duration(call_s, is_usual=True)
    scene = SCENE._replace(roots=[root], limit_s=0.2)

    [result] = run_trials([TimeModel(model=0, variant="steady", backward=True)], scene, budget_s=12.0)

    assert bool(result.now_s) is is_tried
    if not is_tried:
        assert "6 calls of some 12.0 s" in result.refused


def test_every_request_has_a_module_that_runs_it() -> None:
    assert set(trials_by_request()) == set(TrialRequest.__subclasses__())


def test_a_request_comes_back_from_a_file_as_itself() -> None:
    result = TrialResult(trial=TimeOptimizer(optimizer=1), refused="the optimizer is gone")
    text = to_json(result)
    assert b'"time-optimizer"' in text
    assert from_json(text, TrialResult) == result
