from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.checkpoint_stops_step import RULE


def saving(seconds: float, *, calls: float = 1.0) -> EvidenceBuilder:
    """torch.save on line 40 of train.py takes `seconds` of a step of 100 ms."""
    run = EvidenceBuilder()
    run.use("torch.save", run.line("train.py", 40), seconds, calls=calls, detail="tensors", num_bytes=8 << 20)
    return run


def test_a_file_saved_in_every_step_is_named() -> None:
    finding = only_finding(RULE, saving(0.03).build())
    assert finding.where is not None
    assert finding.where.line == 40
    assert finding.cost_s == pytest.approx(0.03)
    assert "8.0 MiB" in finding.because


def test_a_file_saved_every_ten_steps_says_so() -> None:
    assert "every 10 steps" in only_finding(RULE, saving(0.01, calls=0.1).build()).because


def test_a_file_saved_seldom_is_left_alone() -> None:
    assert diagnose(saving(0.002, calls=0.05).build(), [RULE]).findings == ()


def test_one_file_saved_in_the_whole_run_is_left_alone() -> None:
    assert not list(RULE.check(saving(0.03, calls=1 / 60).build()))
