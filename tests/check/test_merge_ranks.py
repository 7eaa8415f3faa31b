"""Several ranks' Evidence made one."""

from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.app.cli.ranks import failed_code
from flatout.app.session import diagnose_all
from flatout.check.merge_ranks import merge
from flatout.core.errors import RecordError
from flatout.core.records.distributed import Collective, Distributed, RankSummary
from flatout.core.records.evidence import Evidence
from flatout.report.parts.diagnosis import diagnosis_blocks
from flatout.report.text import plain_text


def rank(number: int, *, exposed_s: tuple[float, ...], world_size: int = 2, first: int = 4, code: int = 0) -> Evidence:
    """A rank that waited so long in one collective of each step, from step `first` on."""
    run = EvidenceBuilder()
    if number:
        run.line("other.py", 1)  # tables of lines differ between ranks
    line = run.line("train.py", 20, "loss.backward()")
    numbers = tuple(range(first, first + len(exposed_s)))
    collective = Collective(
        op="ddp.gradients",
        source=line,
        phase="backward",
        backend="gloo",
        group_size=world_size,
        num=1,
        bytes=1 << 20,
        seconds=sum(exposed_s) / len(exposed_s),
        exposed_s=sum(exposed_s) / len(exposed_s),
        exposed_by_step=exposed_s,
    )
    summary = RankSummary(
        rank=number,
        host="host",
        step_s=0.1,
        work_s=0.08,
        step_numbers=numbers,
        work_by_step=tuple(0.1 - e for e in exposed_s),
        batch_elements=(64,) * len(numbers),
    )
    distributed = Distributed(
        backend="gloo", rank=number, world_size=world_size, ranks=(summary,), collectives=(collective,)
    )
    return msgspec.structs.replace(
        run.build(), distributed=distributed, exit_code=code, exit="boom" if code else "finished"
    )


def test_the_rank_that_sat_shortest_in_a_collective_waited_for_nobody() -> None:
    merged = merge([rank(1, exposed_s=(0.01, 0.03)), rank(0, exposed_s=(0.03, 0.01))])
    assert merged.distributed is not None
    assert merged.distributed.rank == 0
    assert [r.rank for r in merged.distributed.ranks] == [0, 1]
    assert merged.distributed.collectives[0].wait_s == pytest.approx(0.01)
    assert merged.distributed.collectives[0].transfer_s == pytest.approx(0.01)
    assert [r.wait_s for r in merged.distributed.ranks] == pytest.approx([0.01, 0.01])


def test_only_steps_that_all_ranks_know_are_compared() -> None:
    merged = merge([rank(0, exposed_s=(9.0, 0.03)), rank(1, exposed_s=(0.01, 5.0), first=5)])
    assert merged.distributed is not None
    assert merged.distributed.collectives[0].wait_s == pytest.approx(0.02)


def test_missing_ranks_and_failures_are_said() -> None:
    merged = merge([rank(0, exposed_s=(0.01,), world_size=3), rank(2, exposed_s=(0.01,), world_size=3, code=7)])
    assert merged.distributed is not None
    assert merged.distributed.missing_ranks == (1,)
    assert any("rank 1 of 3 left no evidence" in n for n in merged.notes)
    assert any("rank 2 ended with code 7: boom" in n for n in merged.notes)


def test_a_rank_that_failed_by_itself_gives_the_exit_code() -> None:
    ended = [rank(0, exposed_s=(0.01,), world_size=3), rank(1, exposed_s=(0.01,), world_size=3, code=143)]
    assert failed_code(merge([*ended, rank(2, exposed_s=(0.01,), world_size=3, code=7)])) == 7
    assert failed_code(merge([*ended, rank(2, exposed_s=(0.01,), world_size=3)])) == 0


def test_the_report_of_the_first_host_is_merged_with_ranks_of_others() -> None:
    ranks = [rank(n, exposed_s=(0.01 * (4 - n), 0.05), world_size=4) for n in range(4)]
    whole = merge(ranks)
    first_host = merge(ranks[:2])
    assert any("rank 2, 3 of 4 left no evidence" in n for n in first_host.notes)
    assert merge([first_host, *ranks[1:]]).distributed == whole.distributed
    assert merge([first_host, *ranks[1:]]).notes == whole.notes

    without_the_second = merge([first_host, *ranks[2:]])
    assert without_the_second.distributed is not None
    assert [r.rank for r in without_the_second.distributed.ranks] == [0, 1, 2, 3]
    assert without_the_second.distributed.missing_ranks == ()
    assert without_the_second.notes == whole.notes


def test_the_report_has_a_table_of_ranks() -> None:
    merged = merge([rank(0, exposed_s=(0.03, 0.01)), rank(1, exposed_s=(0.01, 0.03))])
    text = plain_text(diagnosis_blocks(merged, diagnose_all(merged)))
    assert "2 ranks, gloo" in text
    assert "waiting for others" in text
    assert "ddp.gradients" in text


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(RecordError, match="twice"):
        merge([rank(0, exposed_s=(0.01,)), rank(0, exposed_s=(0.01,))])
    with pytest.raises(RecordError, match="different runs"):
        merge([rank(0, exposed_s=(0.01,)), rank(1, exposed_s=(0.01,), world_size=4)])
    with pytest.raises(RecordError, match="single process"):
        merge([EvidenceBuilder().build()])
