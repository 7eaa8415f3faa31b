from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.barrier_in_loop import RULE


def waiting(*, num: float = 1.0, exposed_s: float = 0.01, wait_s: float = 0.0) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line = run.line("train.py", 31, "dist.barrier()")
    run.collective(line, op="barrier", num=num, bytes=0, exposed_s=exposed_s, wait_s=wait_s)
    return run


def test_a_barrier_in_every_step_is_named() -> None:
    finding = only_finding(RULE, waiting().build())
    assert finding.where is not None
    assert finding.where.line == 31
    assert finding.saved_s[1] == pytest.approx(0.01)


def test_the_wait_for_the_last_rank_is_not_saved() -> None:
    finding = only_finding(RULE, waiting(exposed_s=0.03, wait_s=0.02).build())
    assert finding.cost_s == pytest.approx(0.03)
    assert finding.saved_s[1] == pytest.approx(0.01)


def test_a_barrier_around_a_checkpoint_is_left_alone() -> None:
    diagnosis = diagnose(waiting(num=0.01).build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())
