from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from flatout.blocks.parallel.pipeline_stages import shares
from flatout.core.errors import PlanError
from flatout.core.records.scale import FOLDED, LOOPED, SPLIT, ScheduleKind
from flatout.machine.cost.schedules import (
    Action,
    Entry,
    Overlapped,
    Table,
    actions_of,
    chunks_of_stages,
    layers_of_chunks,
    rank_of,
    schedule_table,
    simulated_schedule,
    span_s,
)


def lengths(action: Action) -> float:
    return 2.0 if action.kind == "B" else 1.0


TORCHS: Mapping[ScheduleKind, str] = {
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def spelled(entry: Entry) -> str:
    """As torch writes it."""
    if isinstance(entry, Overlapped):
        return f"({spelled(entry.forward)};{spelled(entry.backward)})OVERLAP_F_B"
    return f"{entry.chunk}{entry.kind}{entry.micro_batch}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "micro_batches"), [(1, 3), (2, 3), (2, 4), (3, 5), (3, 7), (4, 4), (4, 10), (4, 11), (8, 16)]
)
@pytest.mark.parametrize("kind", TORCHS)
def test_the_order_is_torchs_and_what_torch_refuses_is_refused(
    kind: ScheduleKind, stages: int, micro_batches: int
) -> None:
    chunks = (2 + stages % 2 if kind in LOOPED else 2) if kind != "gpipe" else 1
    try:
        ops = get_schedule_ops(TORCHS[kind], stages, micro_batches, *([chunks] if chunks > 1 else []))
    except ValueError:
        with pytest.raises(PlanError):
            schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
        return
    wanted = [[str(op) for op in row if op is not None and "REDUCE" not in str(op)] for row in ops]
    table = schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
    assert [[spelled(entry) for entry in row] for row in table] == wanted
    simulated_schedule(table, seconds=lengths, chunks=chunks)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (3, 3), (4, 9), (8, 8)])
def test_1f1b_is_what_torchs_runs(stages: int, micro_batches: int) -> None:
    """Its printed order is not what it does (2.13 begins the last stage with micro-batch 1), so a stage writes down its calls."""
    for stage_index, row in enumerate(schedule_table("1f1b", stages=stages, micro_batches=micro_batches)):
        stage = mock.create_autospec(PipelineStage, instance=True)
        stage.num_stages, stage.stage_index, stage.group_size = stages, stage_index, stages
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        calls: list[str] = []
        stage.forward_one_chunk.side_effect = lambda i, *_, calls=calls, **__: calls.append(f"F{i}")
        stage.backward_one_chunk.side_effect = lambda i, *_, calls=calls, **__: calls.append(f"B{i}")
        schedule = Schedule1F1B(stage, micro_batches)
        with mock.patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        assert [f"{a.kind}{a.micro_batch}" for entry in row for a in actions_of(entry)] == calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", *TORCHS])
@settings(max_examples=30)
@given(
    stages=st.integers(1, 6),
    rounds=st.integers(2, 4),
    chunks=st.integers(1, 3),
    send_s=st.floats(0, 2),
)
def test_each_action_is_there_once_and_waits_for_what_it_needs(
    kind: ScheduleKind, stages: int, rounds: int, chunks: int, send_s: float
) -> None:
    chunks = chunks if kind in LOOPED else 2 if kind in FOLDED else 1
    micro_batches = rounds * stages
    table = schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
    counts = Counter(action for row in table for entry in row for action in actions_of(entry))
    assert set(counts.values()) == {1}
    assert sum(2 if action.kind == "B" else 1 for action in counts) == 3 * micro_batches * stages * chunks
    for stage, row in enumerate(table):
        assert all(rank_of(kind, a.chunk, stages=stages) == stage for entry in row for a in actions_of(entry))
    rows = simulated_schedule(table, seconds=lengths, send_s=send_s, chunks=chunks)
    ends = {done.action: done.end_s for row in rows for done in row}
    last = stages * chunks - 1
    for row in rows:
        for done in row:
            kind_, chunk, micro_batch = done.action
            if kind_ == "F" and chunk:
                before = [Action("F", chunk - 1, micro_batch)]
            elif kind_ == "W":
                before = [Action("I", chunk, micro_batch)]
            elif kind_ in "BI" and chunk < last:
                before = [a for k in "BI" if (a := Action(k, chunk + 1, micro_batch)) in ends]  # type: ignore[arg-type]
            else:
                before = [] if kind_ == "F" else [Action("F", chunk, micro_batch)]
            for one in before:
                is_sent = rank_of(kind, one.chunk, stages=stages) != rank_of(kind, chunk, stages=stages)
                assert done.begin_s >= ends[one] + send_s * is_sent - 1e-9
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in pairwise(row))


@pytest.mark.slow
@given(stages=st.integers(2, 6), rounds=st.integers(2, 6))
def test_split_backwards_leave_less_of_the_bubble(stages: int, rounds: int) -> None:
    """Where F, I and W take equally long: a third of 1F1B's for ZB-H1 (Qi et al., 2023, table 1), the V's ramp alone for ZB-V."""
    micro_batches = 2 * rounds * stages

    def bubble_s(kind: ScheduleKind, chunks: int = 1) -> float:
        table = schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
        taken_s = span_s(simulated_schedule(table, seconds=lambda a: lengths(a) / chunks, chunks=chunks))
        return taken_s - 3 * micro_batches

    plain = bubble_s("1f1b")
    assert plain == pytest.approx(3 * (stages - 1))
    assert bubble_s("zero-bubble") == pytest.approx(plain / 3)
    assert bubble_s("zbv", 2) == pytest.approx((stages - 1) / 2)
    assert bubble_s("dualpipev", 2) < plain


@given(layers=st.integers(1, 130), num=st.integers(1, 24))
def test_layers_are_dealt_as_a_laid_out_model_deals_them(layers: int, num: int) -> None:
    if layers < num:
        return
    dealt = layers_of_chunks(layers, num)
    assert sum(dealt) == layers
    assert list(dealt) == [len(part) for part in shares([str(i) for i in range(layers)], num)]


def test_folded_schedules_turn_at_the_last_stage() -> None:
    assert chunks_of_stages("zbv", stages=3, parts=2) == ((0, 5), (1, 4), (2, 3))
    assert chunks_of_stages("interleaved", stages=3, parts=2) == ((0, 3), (1, 4), (2, 5))
    assert SPLIT > FOLDED


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 24))
def test_the_bubble_is_the_textbooks(stages: int, micro_batches: int) -> None:
    """(p - 1) / m of the work (Narayanan et al., 2021, section 2.2)."""
    for kind in ("gpipe", "1f1b"):
        table = schedule_table(kind, stages=stages, micro_batches=micro_batches)
        assert span_s(simulated_schedule(table, seconds=lengths)) == pytest.approx(3 * (micro_batches + stages - 1))


@given(stages=st.integers(2, 6), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, rounds: int, chunks: int) -> None:
    """(p - 1) / (m v) of the work (the same, section 2.2)."""
    micro_batches = rounds * stages
    table = schedule_table("interleaved", stages=stages, micro_batches=micro_batches, chunks=chunks)
    taken_s = span_s(simulated_schedule(table, seconds=lambda a: lengths(a) / chunks, chunks=chunks))
    assert taken_s == pytest.approx(3 * micro_batches + 3 * (stages - 1) / chunks)


def test_1f1b_holds_no_more_activations_than_stages() -> None:
    for stage, row in enumerate(schedule_table("1f1b", stages=4, micro_batches=12)):
        held = most = 0
        for action in (a for entry in row for a in actions_of(entry)):
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert most == 4 - stage


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(PlanError, match="11 micro-batches on 4 stages do not come in 2 equal rounds"):
        schedule_table("interleaved", stages=4, micro_batches=11, chunks=2)
    with pytest.raises(PlanError, match="dualpipev needs two micro-batches a stage"):
        schedule_table("dualpipev", stages=4, micro_batches=7)
    stuck: Table = ((Action("B", 0, 0), Action("F", 0, 0)),)
    with pytest.raises(PlanError, match="wait for each other"):
        simulated_schedule(stuck, seconds=lengths)
