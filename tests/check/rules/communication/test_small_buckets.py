from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.small_buckets import RULE


def one_by_one(*, num: float = 50.0, small_call_s: float = 0.001, wait_s: float = 0.0) -> EvidenceBuilder:
    """Each parameter's gradient reduced by itself on line 27: 50 ms of a step of 100 ms."""
    run = EvidenceBuilder()
    line = run.line("train.py", 27, "dist.all_reduce(p.grad)")
    run.collective(line, num=num, bytes=1 << 20, exposed_s=0.05, wait_s=wait_s, small_call_s=small_call_s)
    return run


def test_the_fixed_cost_of_all_calls_but_one_is_saved() -> None:
    finding = only_finding(RULE, one_by_one().build())
    assert finding.where is not None
    assert finding.where.line == 27
    assert finding.saved_s == pytest.approx((0.0245, 0.049))


def test_no_more_is_saved_than_the_transfer() -> None:
    assert only_finding(RULE, one_by_one(wait_s=0.03).build()).saved_s[1] == pytest.approx(0.02)


@pytest.mark.parametrize("how", [{"num": 1.0}, {"small_call_s": 0.0}], ids=["one call", "no small call"])
def test_large_calls_are_left_alone(how: dict[str, float]) -> None:
    assert list(RULE.check(one_by_one(**how).build())) == []


def test_many_small_buckets_are_a_note() -> None:
    run = EvidenceBuilder()
    run.replication(
        run.line("train.py", 9, "DistributedDataParallel(net, bucket_cap_mb=0.1)"), bucket_bytes=(100_000,) * 40
    )
    diagnosis = diagnose(run.build(), [RULE])
    assert diagnosis.findings == ()
    assert "40 gradient buckets" in diagnosis.notes[0].text


def test_a_few_large_buckets_are_as_they_should_be() -> None:
    run = EvidenceBuilder()
    run.replication(run.line("train.py", 9), bucket_bytes=(25 << 20,) * 12)
    assert diagnose(run.build(), [RULE]).notes == ()
