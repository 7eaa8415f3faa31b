from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.core.errors import PlanError
from flatout.core.records.scale import FOLDED, LOOPED, ScheduleKind
from flatout.machine.cost.schedules import schedule_table, simulated_schedule, span_s
from flatout.machine.cost.spans import table_span_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(ScheduleKind))
@settings(max_examples=30)
@given(
    stages=st.integers(1, 5),
    rounds=st.integers(2, 4),
    send_s=st.floats(0, 2),
    seconds=st.lists(st.floats(0.1, 3), min_size=120, max_size=120),
)
def test_adding_times_gives_what_playing_gives(
    kind: ScheduleKind, stages: int, rounds: int, send_s: float, seconds: list[float]
) -> None:
    chunks = 3 if kind in LOOPED else 2 if kind in FOLDED else 1
    numbers = iter(seconds)
    of = {(k, chunk): next(numbers) for k in "FBIW" for chunk in range(stages * chunks)}
    table = schedule_table(kind, stages=stages, micro_batches=rounds * stages, chunks=chunks)
    rows = simulated_schedule(table, seconds=lambda a: of[a.kind, a.chunk], send_s=send_s, chunks=chunks)
    found = table_span_s(kind, of, stages=stages, micro_batches=rounds * stages, chunks=chunks, send_s=send_s)
    assert found == pytest.approx(span_s(rows))


def test_impossible_tables_are_refused_here_too() -> None:
    with pytest.raises(PlanError, match="dualpipev needs two micro-batches a stage, 8, and there are 4"):
        table_span_s("dualpipev", {}, stages=4, micro_batches=4, chunks=2)
