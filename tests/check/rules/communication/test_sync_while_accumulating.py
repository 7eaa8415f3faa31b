from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.sync_while_accumulating import RULE


def accumulating(*, syncs: float = 4.0, exposed_s: float | None = 0.01, waited_s: float = 0.0) -> EvidenceBuilder:
    run = EvidenceBuilder()
    backward = run.line("train.py", 22, "loss.backward()")
    module = run.line("train.py", 9, "model = DistributedDataParallel(net)")
    run.replication(module, backward=backward, syncs_per_step=syncs, exposed_per_sync_s=exposed_s)
    total_s = (exposed_s or 0.0) * syncs
    run.collective(
        backward, op="ddp.gradients", phase="backward", num=syncs, bytes=4 << 20, exposed_s=total_s, wait_s=waited_s
    )
    run.optimizer(run.line("train.py", 24, "optimizer.step()"))
    return run


def test_all_synchronisations_but_the_last_are_saved() -> None:
    finding = only_finding(RULE, accumulating().build())
    assert finding.where is not None
    assert finding.where.line == 22
    assert finding.saved_s == pytest.approx((0.03, 0.03))


def test_what_was_waited_for_slower_ranks_may_remain() -> None:
    finding = only_finding(RULE, accumulating(waited_s=0.02).build())
    assert finding.saved_s == pytest.approx((0.015, 0.03))


def test_one_synchronisation_a_step_is_as_it_should_be() -> None:
    assert list(RULE.check(accumulating(syncs=1.03).build())) == []


def test_without_a_price_it_is_only_a_note() -> None:
    diagnosis = diagnose(accumulating(exposed_s=None).build(), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [22]


def test_two_optimizers_may_mean_two_updates_so_it_is_only_a_note() -> None:
    run = accumulating()
    run.optimizer(run.line("train.py", 40, "critic_optimizer.step()"))
    diagnosis = diagnose(run.build(), [RULE])
    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1
