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


def four_ranks(works: tuple[float, float, float, float]) -> EvidenceBuilder:
    """Two ranks on each of two nodes, whose works differ a little from step to step, on equal batches."""
    run = EvidenceBuilder()
    for rank, work_s in enumerate(works):
        run.rank(
            work_s=[work_s + 1e-3 * ((i + rank) % 2) for i in range(20)], elements=[4096] * 20, host=f"n{rank // 2}"
        )
    return run


def test_a_node_whose_ranks_are_all_slow_is_named() -> None:
    finding = only_finding(RULE, four_ranks((0.05, 0.052, 0.080, 0.080)).build())
    assert finding.where is None
    assert "each rank of node n1" in finding.because and "rank 0 on n0 50." in finding.because
    assert "node n1" in finding.edit
    assert finding.saved_s[1] == pytest.approx(0.028, abs=2e-3)


def test_one_slow_rank_of_a_node_is_named_with_its_node() -> None:
    finding = only_finding(RULE, four_ranks((0.05, 0.051, 0.050, 0.090)).build())
    assert finding.because.startswith("rank 3 on n1 works")


def test_nodes_that_take_turns_are_no_stragglers() -> None:
    run = EvidenceBuilder()
    for rank in range(4):
        run.rank(
            work_s=[0.09 if i % 2 == rank // 2 else 0.05 for i in range(20)], elements=[64] * 20, host=f"n{rank // 2}"
        )
    assert list(RULE.check(run.build())) == []
