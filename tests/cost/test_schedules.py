from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from flatout.cost.schedules import Action, Table, played, span_s, table_of
from flatout.errors import PlanError
from flatout.records.scale import ScheduleKind


def lengths(action: Action) -> float:
    return 1.0 if action.kind == "F" else 2.0


@pytest.mark.parametrize(("kind", "torchs", "chunks"), [("gpipe", "GPipe", 1), ("interleaved", "Interleaved1F1B", 2)])
def test_the_order_is_torchs(kind: ScheduleKind, torchs: str, chunks: int) -> None:
    for stages, micro_batches in ((2, 4), (4, 8), (4, 4)):
        given_ops = get_schedule_ops(torchs, stages, micro_batches, *([chunks] if chunks > 1 else []))
        wanted = [[str(op) for op in row if op is not None and "REDUCE" not in str(op)] for row in given_ops]
        table = table_of(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
        assert [[f"{a.chunk}{a.kind}{a.micro_batch}" for a in row] for row in table] == wanted


@given(
    kind=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    stages=st.integers(1, 6),
    rounds=st.integers(1, 4),
    chunks=st.integers(1, 3),
    send_s=st.floats(0, 2),
)
def test_each_action_is_there_once_and_waits_for_what_it_needs(
    kind: ScheduleKind, stages: int, rounds: int, chunks: int, send_s: float
) -> None:
    chunks = chunks if kind == "interleaved" else 1
    micro_batches = rounds * stages
    table = table_of(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
    counts = Counter(action for row in table for action in row)
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * micro_batches * stages * chunks
    assert all(action.chunk % stages == stage for stage, row in enumerate(table) for action in row)
    rows = played(table, seconds=lengths, send_s=send_s, chunks=chunks)
    ends = {done.action: done.end_s for row in rows for done in row}
    begins = {done.action: done.begin_s for row in rows for done in row}
    for action, begin_s in begins.items():
        before = (
            action._replace(chunk=action.chunk - 1) if action.kind == "F" else action._replace(chunk=action.chunk + 1)
        )
        if before in ends:
            wire_s = send_s if before.chunk % stages != action.chunk % stages else 0.0
            assert begin_s >= ends[before] + wire_s - 1e-9
        elif action.kind == "B":
            assert begin_s >= ends[action._replace(kind="F")]
    for row in rows:
        assert all(a.end_s <= b.begin_s for a, b in pairwise(row))


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 24))
def test_the_bubble_is_the_textbooks(stages: int, micro_batches: int) -> None:
    """(p - 1) / m of the work (Narayanan et al., 2021, section 2.2)."""
    for kind in ("gpipe", "1f1b"):
        table = table_of(kind, stages=stages, micro_batches=micro_batches)
        assert span_s(played(table, seconds=lengths)) == pytest.approx(3 * (micro_batches + stages - 1))


@given(stages=st.integers(2, 6), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, rounds: int, chunks: int) -> None:
    """(p - 1) / (m v) of the work (the same, section 2.2)."""
    micro_batches = rounds * stages
    table = table_of("interleaved", stages=stages, micro_batches=micro_batches, chunks=chunks)
    taken_s = span_s(played(table, seconds=lambda a: lengths(a) / chunks, chunks=chunks))
    assert taken_s == pytest.approx(3 * micro_batches + 3 * (stages - 1) / chunks)


def test_1f1b_holds_no_more_activations_than_stages() -> None:
    for stage, row in enumerate(table_of("1f1b", stages=4, micro_batches=12)):
        held = most = 0
        for action in row:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert most == 4 - stage


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(PlanError, match="6 micro-batches are no multiple of 4 stages"):
        table_of("interleaved", stages=4, micro_batches=6, chunks=2)
    stuck: Table = ((Action("B", 0, 0), Action("F", 0, 0)),)
    with pytest.raises(PlanError, match="wait for each other"):
        played(stuck, seconds=lengths)
