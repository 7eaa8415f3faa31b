from __future__ import annotations

import pytest
from tests.check.rules.input.loading import waiting
from tests.evidence_builder import only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.input.workers_restarted import RULE


def test_the_start_of_each_epoch_is_priced_by_its_first_batch() -> None:
    run = waiting(wait_s=0.002, restart_s=0.04, num_workers=2, num_epochs=0.1, first_wait_s=0.402)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 9
    assert finding.saved_s == (pytest.approx(0.034), pytest.approx(0.04))
    assert "persistent_workers=True" in finding.edit


@pytest.mark.parametrize(
    "loader",
    [
        {"num_workers": 0, "num_epochs": 0.1},
        {"num_workers": 2, "num_epochs": 0.1, "persistent_workers": True},
        {"num_workers": 2, "num_epochs": 0.0},
    ],
)
def test_loaders_that_start_no_workers_again_are_left_alone(loader: dict[str, float]) -> None:
    assert not list(RULE.check(waiting(wait_s=0.002, first_wait_s=0.4, **loader).build()))


def test_long_epochs_are_not_reported() -> None:
    run = waiting(wait_s=0.002, num_workers=2, num_epochs=0.001, first_wait_s=0.4)
    assert diagnose(run.build(), [RULE]).findings == ()
