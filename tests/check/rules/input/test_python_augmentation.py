from __future__ import annotations

from tests.check.rules.input.loading import fetched, waiting
from tests.evidence_builder import only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.input import slow_loader
from flatout.check.rules.input.python_augmentation import RULE
from flatout.core.records.trial import TimeDataset, TrialResult


def test_the_data_set_is_tried_by_hand() -> None:
    assert proposed(RULE, waiting().build()) == [TimeDataset(loader=0)]


def test_items_that_differ_each_time_are_named_at_the_users_line() -> None:
    run = waiting(wait_s=0.06)
    fetched(run, repeatable=False)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert (finding.where.file, finding.where.line) == ("/home/ada/data.py", 5)
    assert "whole batch" in finding.edit


def test_the_wait_is_reported_once() -> None:
    run = waiting(wait_s=0.06)
    fetched(run, repeatable=False)
    assert [f.rule for f in diagnose(run.build(), [RULE, slow_loader.RULE]).findings] == [RULE.id]


def test_repeatable_items_are_left_alone() -> None:
    run = waiting()
    fetched(run, repeatable=True)
    assert not list(RULE.check(run.build()))


def test_items_of_which_nobody_knows_whether_they_repeat_are_left_alone() -> None:
    run = waiting(wait_s=0.06)
    run.trial(TrialResult(trial=TimeDataset(loader=0), now_s=0.06, cured_s=0.001, facts={"item_by_item": True}))
    assert not list(RULE.check(run.build()))


def test_workers_that_keep_up_are_left_alone() -> None:
    run = waiting(wait_s=0.02, num_workers=2)
    fetched(run, now_s=0.01, repeatable=False)
    assert not list(RULE.check(run.build()))
