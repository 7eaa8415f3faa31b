"""The timeline of a pipeline in text: a letter a slice, the bubble as it was played, cut where it is long."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reporting.scale_builder import rows

from flatout.cost.schedules import span_s
from flatout.records.scale import ScheduleKind
from flatout.reporting.pipeline import idle_of, shown, stretches, timeline_lines, whole_of

KINDS: tuple[tuple[ScheduleKind, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("looped-bfs", 2),
    ("zero-bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)


def letters(lines: list[str]) -> dict[int, str]:
    """What was drawn of each stage."""
    found = [re.fullmatch(r"stage (\d+) +(.*?) +[<\d.]+ %", line) for line in lines]
    return {int(one[1]): one[2] for one in found if one is not None}


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


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_letters_are_as_many_as_their_seconds(kind: ScheduleKind, chunks: int) -> None:
    played = rows(kind, stages=3, micro_batches=6, chunks=chunks)
    lines = list(timeline_lines(played))
    drawn = letters(lines)
    per_letter = idle_of(played).span_s / len(drawn[0])
    assert per_letter == pytest.approx(0.1, rel=0.02) or per_letter < 0.1
    for stage, row in enumerate(played):
        for letter in "FBIW":
            seconds = sum(done.end_s - done.begin_s for done in row if done.action.kind == letter)
            assert drawn[stage].upper().count(letter) * per_letter == pytest.approx(seconds, rel=0.05)
            assert drawn[stage].count(letter) == sum(done.action.kind == letter for done in row)
        assert drawn[stage].count(".") * per_letter == pytest.approx(idle_of(played).of_stages_s[stage], abs=per_letter)


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 4), (8, 256), (40, 80)])
def test_no_line_is_wider_than_100(kind: ScheduleKind, chunks: int, stages: int, micro_batches: int) -> None:
    lines = list(timeline_lines(rows(kind, stages=stages, micro_batches=micro_batches, chunks=chunks, send_s=0.003)))
    assert max(map(len, lines)) <= 100
    assert len(letters(lines)) == min(stages, 16)
    assert len({len(drawn) for drawn in letters(lines).values()}) == 1


def test_a_long_step_shows_its_ends_and_says_what_is_left_out() -> None:
    played = rows(micro_batches=128)
    lines = list(timeline_lines(played))
    drawn = letters(lines)
    assert all(" ~~ " in one for one in drawn.values())
    assert drawn[3].startswith("...FBbFBb")
    assert drawn[0].endswith("BbFBb.Bb.Bb.Bb") or drawn[0].endswith("Bb.Bb.Bb")
    left_out_s = idle_of(played).span_s - 76 * 0.1
    assert lines[-1] == f"~~ stands for {left_out_s:.1f} s in the middle"


def test_stages_that_are_not_shown_are_counted() -> None:
    assert "...      24 stages between" in list(timeline_lines(rows(stages=40, micro_batches=4)))


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


def test_golden(golden: Callable[[str, str], None]) -> None:
    shown_rows = (
        rows("1f1b"),
        rows("interleaved", chunks=2, send_s=0.01),
        rows("zbv", micro_batches=12),
        rows("dualpipev", micro_batches=12),
        rows("1f1b", stages=20, micro_batches=64),
    )
    golden("pipeline", "\n\n".join("\n".join(timeline_lines(one)) for one in shown_rows) + "\n")
