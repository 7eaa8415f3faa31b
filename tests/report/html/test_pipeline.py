"""What is shown of a pipeline's step: the bubble as it was played, and the stages and stretches there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.scale_builder import rows

from flatout.core.records.scale import ScheduleKind
from flatout.machine.cost.schedules import span_s
from flatout.report.html.pipeline import idle_of, shown, stretches, whole_of

KINDS: tuple[tuple[ScheduleKind, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("looped-bfs", 2),
    ("zero-bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)


@settings(deadline=None, max_examples=40)
@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 24))
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_formula(stages: int, micro_batches: int) -> None:
    for kind in ("gpipe", "1f1b"):
        idle = idle_of(rows(kind, stages=stages, micro_batches=micro_batches))
        assert idle.share == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-9)


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_bubble_and_work_together_are_all_of_the_time(kind: ScheduleKind, chunks: int) -> None:
    played = rows(kind, chunks=chunks, send_s=0.01)
    idle = idle_of(played)
    work_s = sum(done.end_s - done.begin_s for row in played for done in row)
    assert idle.span_s == pytest.approx(span_s(played))
    assert sum(idle.of_stages_s) + work_s == pytest.approx(4 * idle.span_s)
    assert idle.of_stages_s[idle.busiest] == pytest.approx(min(idle.of_stages_s))


@given(num=st.integers(1, 200), most=st.integers(2, 20), at=st.integers(0, 199))
def test_the_first_the_last_and_the_named_stage_are_always_shown(num: int, most: int, at: int) -> None:
    besides = min(at, num - 1)
    found = shown(num, most=most, besides=besides)
    assert {0, num - 1, besides} <= set(found)
    assert list(found) == sorted(set(found)) and len(found) <= most + 1


@given(whole_s=st.floats(0.1, 30.0), share=st.floats(0.1, 1.0))
def test_stretches_are_the_whole_or_its_two_ends(whole_s: float, share: float) -> None:
    played = rows()
    whole = whole_of(played)
    parts = stretches(played, whole_s=whole_s, ends_s=share * whole_s)
    assert parts[0].begin_s == whole.begin_s and parts[-1].end_s == pytest.approx(whole.end_s)
    if whole.length_s <= whole_s:
        assert parts == (whole,)
    else:
        assert sum(part.length_s for part in parts) == pytest.approx(share * whole_s)
        assert parts[0].end_s <= parts[1].begin_s
