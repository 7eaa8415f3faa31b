from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.communication.straggler import RULE
from flatout.core.records.distributed import RankLine


def three_ranks(*, last_s: float = 0.08, is_always: bool = True) -> EvidenceBuilder:
    """Ranks that work 50, 52 and `last_s` seconds of each step (every second step when not always), on equal batches."""
    run = EvidenceBuilder()
    line = run.line("train.py", 33, "write_log(loss)")
    for rank, work_s in enumerate((0.05, 0.052, last_s)):
        steps = [work_s if is_always or i % 2 or rank < 2 else 0.049 for i in range(20)]
        lines = (RankLine(source=line, phase="other", seconds=last_s - 0.051),) if rank == 2 else ()
        run.rank(work_s=steps, elements=[4096] * 20, lines=lines)
    return run


def test_the_slow_rank_is_named_with_the_line_that_it_spends_more_on() -> None:
    finding = only_finding(RULE, three_ranks().build())
    assert finding.where is not None
    assert finding.where.line == 33
    assert "rank 2" in finding.because
    assert finding.saved_s == pytest.approx((0.014, 0.028))


def test_a_rank_that_is_last_half_of_the_time_is_no_straggler() -> None:
    assert list(RULE.check(three_ranks(is_always=False).build())) == []


def test_a_rank_with_larger_batches_is_another_cause() -> None:
    run = EvidenceBuilder()
    for scale in (1, 2):
        sizes = [scale * (200 + 10 * (i % 5)) for i in range(20)]
        run.rank(work_s=[1e-4 * n for n in sizes], elements=sizes)
    assert list(RULE.check(run.build())) == []
