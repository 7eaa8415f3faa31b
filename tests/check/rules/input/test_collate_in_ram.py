from __future__ import annotations

import pytest
from tests.check.rules.input.loading import fetched, waiting
from tests.evidence_builder import only_finding, proposed

from flatout.check.rules.input.collate_in_ram import RULE
from flatout.core.records.trial import TimeDataset


def test_the_data_set_is_tried_by_hand() -> None:
    assert proposed(RULE, waiting(is_in_ram=True).build()) == [TimeDataset(loader=0)]


def test_rows_of_tensors_are_priced_by_the_trial_at_the_line_that_made_the_loader() -> None:
    run = waiting(wait_s=0.06, is_in_ram=True)
    fetched(run, now_s=0.03, cured_s=0.003, views=True, takes_batches=True)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 9
    assert finding.basis == "trial"
    assert finding.saved_s[1] == pytest.approx(0.9 * 0.06), "the wait shrinks as the batch does in the trial"
    assert "BatchSampler" in finding.edit


def test_views_in_a_data_set_of_the_users_own_are_found_too() -> None:
    run = waiting()
    fetched(run, views=True)
    assert "BatchSampler" not in only_finding(RULE, run.build()).edit


@pytest.mark.parametrize(
    ("loader", "facts"),
    [
        ({}, {"views": False}),
        ({"is_in_ram": True, "has_own_collate": True}, {}),
        ({"is_in_ram": True}, {"item_by_item": False}),
    ],
)
def test_items_that_are_made_and_batches_that_are_indexed_are_left_alone(
    loader: dict[str, bool], facts: dict[str, bool]
) -> None:
    run = waiting(**loader)
    fetched(run, **facts)
    assert not list(RULE.check(run.build()))


def test_nothing_is_said_without_the_trial() -> None:
    assert not list(RULE.check(waiting(is_in_ram=True).build()))
