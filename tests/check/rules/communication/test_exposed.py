from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.exposed import RULE


def averaging(**how: object) -> EvidenceBuilder:
    """Gradients averaged by hand on line 27 after a backward of 50 ms."""
    run = EvidenceBuilder()
    line = run.line("train.py", 27, "dist.all_reduce(flat)")
    run.collective(line, **({"bytes": 40 << 20, "exposed_s": 0.03} | how))  # type: ignore[arg-type]
    return run


def test_averaging_after_the_backward_could_run_beside_it() -> None:
    finding = only_finding(RULE, averaging().build())
    assert finding.where is not None
    assert finding.where.line == 27
    assert finding.saved_s == pytest.approx((0.009, 0.027))


def test_waiting_for_the_slower_rank_is_no_transfer() -> None:
    assert diagnose(averaging(wait_s=0.029).build(), [RULE]).findings == ()


def test_a_number_for_the_log_is_another_cause() -> None:
    assert list(RULE.check(averaging(bytes=4).build())) == []


def test_gradients_of_ddp_are_a_note_when_they_take_long() -> None:
    run = averaging(op="ddp.gradients", phase="backward", caller="torch.nn.parallel")
    diagnosis = diagnose(run.build(), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [27]


def test_gradients_of_ddp_that_overlap_are_not_mentioned() -> None:
    run = averaging(op="ddp.gradients", phase="backward", caller="torch.nn.parallel", exposed_s=0.004)
    assert diagnose(run.build(), [RULE]).notes == ()
