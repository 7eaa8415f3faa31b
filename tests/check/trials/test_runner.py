"""Trials are found in their folder, one for each request that a rule can make."""

from __future__ import annotations

from flatout.check.trials.runner import trials_by_request
from flatout.core.records.record import from_json, to_json
from flatout.core.records.trial import TimeOptimizer, TrialRequest, TrialResult


def test_every_request_has_a_module_that_runs_it() -> None:
    assert set(trials_by_request()) == set(TrialRequest.__subclasses__())


def test_a_request_comes_back_from_a_file_as_itself() -> None:
    result = TrialResult(trial=TimeOptimizer(optimizer=1), refused="the optimizer is gone")
    text = to_json(result)
    assert b'"time-optimizer"' in text
    assert from_json(text, TrialResult) == result
