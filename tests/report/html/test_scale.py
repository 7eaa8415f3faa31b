"""The planner's pages: the answer first, bars in proportion, the pipeline as it was played, nothing that can run or load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tests.page_reader import Page, check_harmless
from tests.report.scale_builder import CLUSTER, FIRST, FOUND, GIB, LAYOUT, LLAMA, SECOND, STAGES, memory, rows

from flatout.core.records.failure import Goodput
from flatout.core.records.scale import ScheduleKind, StageMemory
from flatout.report.html.pipeline import WIDTH_PX, idle_of, pipeline_of
from flatout.report.html.scale import Failing, First, Question, fit_page, scale_page
from flatout.report.html.stages import PARTS, memory_chart, part_sizes, step_chart
from flatout.scale.search import Ranking

HOW = "Predicted from data sheets."
QUESTION = Question("llama-70b", LLAMA, CLUSTER, 512, 80 * GIB)
KEPT = Goodput(goodput=0.9, saving=0.05, lost=0.03, down=0.02, interval_s=3600.0, mtbf_s=1e5)
FAILING = Failing("6.5 interruptions per 1000 node-days", {"as it is": KEPT}, {"as it is": [(256, 0.97), (1024, 0.9)]})
NAMESPACE = "{http://www.w3.org/2000/svg}"


def whole_page() -> bytes:
    return scale_page(FOUND, QUESTION, how=HOW, first=First(STAGES, rows("interleaved", chunks=2)), failing=FAILING)


@pytest.mark.slow
def test_question_and_answer_come_first() -> None:
    page = Page(whole_page())
    text = page.text[page.text.index("Skip to the report") :]
    order = (
        "llama-70b on 1024 x nvidia-h100-sxm, 512 samples of 8192 tokens",
        "8.90 s a step by the best of 214 layouts",
        "7.60 - 10.20 s, 44 % MFU. Of the step: compute 67 %, tensor communication 17 %, bubble 11 %",
        "tokens a second 471k",
        "a trillion tokens 24.6 days",
        "fullest device 67.0 GiB 84 % of 80.0 GiB",
        "kept despite failures 90 % as it is; a trillion tokens 27.3 days",
        HOW,
        "The layout",
        "Each layer is divided over 8 neighbouring devices",
        "Where a step goes",
        "takes 700 ms (7.9 %) more: data communication +1.70 s, bubble -1.00 s.",
        "The intervals of the first 2 meet",
        "Ranking 214 layouts, 90 of them too large.",
        "What a device holds at its peak",
        "stage 0 is the fullest",
        "The pipeline: 16 % bubble",
        "What failures leave of the time",
        "How far to trust this",
    )
    places = [text.find(said) for said in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_the_title_is_the_whole_answer() -> None:
    page = whole_page().decode()
    assert (
        "<title>llama-70b on 1024 x nvidia-h100-sxm, 512 samples of 8192 tokens: "
        "8.90 s a step (7.60 - 10.20 s), 44 % MFU</title>" in page
    )


@pytest.mark.parametrize(
    "page",
    [
        whole_page,
        lambda: scale_page(FOUND, QUESTION, how=HOW),
        lambda: scale_page(Ranking((), 10, 10, memory(40, 40)), QUESTION, how=HOW),
        lambda: fit_page(STAGES, LAYOUT, name="llama-70b", model=LLAMA, room_bytes=None),
    ],
    ids=["whole", "bare", "none-fits", "fit"],
)
def test_a_page_is_whole_and_harmless_and_says_what_it_shows(page: Callable[[], bytes]) -> None:
    read = Page(page())
    check_harmless(read)
    assert all(value for _, name, value in read.attributes if name == "aria-label")
    images = sum(name == "role" and value == "img" for _, name, value in read.attributes)
    regions = sum(name == "role" and value == "region" for _, name, value in read.attributes)
    assert sum(name == "aria-label" for _, name, _ in read.attributes) == images + regions + 1
    ids = [value for _, name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value[1:] for tag, name, value in read.attributes if name == "href"}
    assert links <= set(ids)


def test_bars_stand_in_tables_too() -> None:
    read = Page(whole_page())
    assert "stage weights gradients optimizer state activations logits slack all" in read.text
    assert "0 10.0 GiB 10.0 GiB 5.00 GiB 40.0 GiB 0 B 2.00 GiB 67.0 GiB" in read.text
    assert read.tags.count("table") == 4


def test_a_second_that_is_as_fast_is_said_to_be() -> None:
    found = Ranking((FIRST, msgspec.structs.replace(SECOND, step=FIRST.step)), 2, 0, None)
    assert "The next, tensor 8, data 128 (fsdp), 1 x 4, is as fast." in Page(scale_page(found, QUESTION, how=HOW)).text


def test_what_is_not_known_is_not_shown() -> None:
    read = Page(scale_page(FOUND, QUESTION, how=HOW))
    ids = {value for _, name, value in read.attributes if name == "id"}
    assert {"layout", "step", "ranking", "memory", "method"} <= ids
    assert ids.isdisjoint({"pipeline", "failures"})
    assert "The first's fullest stage." in read.text


def test_where_nothing_fits_the_smallest_is_shown() -> None:
    read = Page(scale_page(Ranking((), 10, 10, memory(40, 40)), QUESTION, how=HOW))
    assert "None of 10 layouts fits" in read.text
    assert "The smallest takes more than the 80.0 GiB of a device" in read.text
    assert "fullest 127 GiB too large" in read.text


def test_fitting_says_whether_it_fits() -> None:
    def text(room_bytes: float | None) -> str:
        return Page(fit_page(STAGES, LAYOUT, name="llama-70b", model=LLAMA, room_bytes=room_bytes)).text

    assert "67.0 GiB on the fullest device, of 80.0 GiB It fits." in text(80 * GIB)
    assert "67.0 GiB on the fullest device, of 60.0 GiB It does not fit." in text(60 * GIB)
    assert "fit." not in text(None)
    assert "70.6 G parameters" in text(None)


def test_every_field_of_a_stages_total_has_a_part() -> None:
    """A field that is added to the record must be drawn, or bars would be too short."""
    counted = StageMemory(**{name: 1 << i for i, name in enumerate(StageMemory.__struct_fields__)})
    assert sum(size for _, size in part_sizes(counted)) == counted.total_bytes, "name and colour a new part"
    assert len({part.style for part in PARTS.values()}) == len(PARTS)


def test_memory_bars_are_as_long_as_their_bytes() -> None:
    chart = memory_chart(STAGES, room_bytes=80 * GIB)
    assert chart.limit is not None and chart.limit < 1
    for bar, stage in zip(chart.bars, STAGES, strict=True):
        assert bar.fraction / chart.limit == pytest.approx(stage.total_bytes / (80 * GIB))
        assert sum(piece.fraction for piece in bar.pieces) == pytest.approx(1)
        assert not bar.is_over
    assert [bar.is_over for bar in memory_chart(STAGES, room_bytes=60 * GIB).bars] == [True, False, False, False]
    assert memory_chart(STAGES, room_bytes=None).limit is None


def test_step_bars_are_as_long_as_their_seconds() -> None:
    bars = step_chart(FOUND.best).bars
    for bar, one in zip(bars, FOUND.best, strict=True):
        assert bar.fraction / bars[0].fraction == pytest.approx(one.step.total_s / FIRST.step.total_s)
        assert sum(piece.fraction for piece in bar.pieces) == pytest.approx(1)
        assert bar.interval is not None
        assert bar.interval[0] / bar.fraction == pytest.approx(one.low_s / one.step.total_s)
        assert bar.interval[1] <= 1


def test_the_bubble_of_the_drawing_is_that_of_the_step_only_where_they_are_equal() -> None:
    played = rows()
    of_rows = min(idle_of(played).of_stages_s)
    for bubble_s, is_same in ((of_rows, True), (2 * of_rows, False)):
        one = msgspec.structs.replace(FIRST, step=msgspec.structs.replace(FIRST.step, bubble_s=bubble_s))
        page = scale_page(Ranking((one,), 1, 0, None), QUESTION, how=HOW, first=First(STAGES, played))
        assert ("that is the bubble of the step above" in page.decode()) == is_same


def boxes(svg: str, look: str) -> list[tuple[float, float, float, str]]:
    """(left, top, width, tip) of each rectangle."""
    found = [
        one for one in ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect") if look in one.get("class", "").split()
    ]
    return [
        (*(float(one.get(name, "")) for name in ("x", "y", "width")), one.findtext(f"{NAMESPACE}title") or "")  # type: ignore[misc]
        for one in found
    ]


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)],
)
def test_boxes_are_as_long_as_their_seconds_and_leave_the_bubble_free(kind: ScheduleKind, chunks: int) -> None:
    played = rows(kind, chunks=chunks, send_s=0.01)
    timeline = pipeline_of(played)
    assert timeline is not None and not timeline.cut_s and not timeline.num_hidden
    drawn, free = boxes(timeline.svg, "box"), boxes(timeline.svg, "bubble")
    assert len(drawn) == sum(map(len, played)) and len(free) == 4
    px_per_s = free[0][2] / timeline.idle.span_s
    for stage, (_, top, width, tip) in enumerate(free):
        own = sum(box[2] + 0.6 for box in drawn if box[1] == top)
        assert width - own == pytest.approx(timeline.idle.of_stages_s[stage] * px_per_s, abs=0.1 * len(played[stage]))
        assert tip.startswith(f"stage {stage}: bubble ")
    assert timeline.num_parts == (1 if chunks == 1 else 2)
    assert bool(boxes(timeline.svg, "pale")) == (chunks > 1)


@pytest.mark.slow
def test_a_long_step_of_many_stages_is_cut_and_stays_small() -> None:
    played = rows("zero-bubble", stages=64, micro_batches=128, chunks=2)
    timeline = pipeline_of(played)
    assert timeline is not None
    assert timeline.num_hidden == 48
    assert "48 stages between" in timeline.svg and "left out" in timeline.svg
    assert len(timeline.svg) < 500_000
    pieces = sorted({(left, width) for left, _, width, _ in boxes(timeline.svg, "bubble")})
    assert len(pieces) == 2
    px_per_s = pieces[0][1] / ((timeline.idle.span_s - timeline.cut_s) / 2)
    assert px_per_s * 0.1 == pytest.approx(8.0, rel=1e-3)
    for left, _, width, _ in boxes(timeline.svg, "box"):
        assert any(at - 0.1 <= left and left + width <= at + room + 0.5 for at, room in pieces)


def test_ticks_are_round_and_inside() -> None:
    timeline = pipeline_of(rows(micro_batches=7, send_s=0.003))
    assert timeline is not None
    labels = re.findall(r'class="middle">([\d.]+) s<', timeline.svg)
    steps = {round(float(b) - float(a), 6) for a, b in pairwise(labels)}
    assert len(labels) >= 4 and len(steps) == 1
    assert max(float(x) for x in re.findall(r'<path d="M([\d.]+)', timeline.svg)) <= WIDTH_PX


def test_a_single_stage_has_no_timeline() -> None:
    assert pipeline_of(rows(stages=1)) is None


def test_a_models_name_is_text() -> None:
    name = "</title><script>alert(1)</script>\u202e"
    page = scale_page(FOUND, QUESTION._replace(name=name), how=name, first=First(STAGES, rows()))
    read = Page(page)
    check_harmless(read)
    assert "script" not in read.tags
    assert "<script>alert(1)</script>" in read.text and "\u202e" not in read.text


@pytest.mark.slow
def test_a_page_without_failures_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tests.report.scale_builder import FOUND, STAGES, rows\n"
        "from tests.report.html.test_scale import HOW, QUESTION, First, scale_page\n"
        "scale_page(FOUND, QUESTION, how=HOW, first=First(STAGES, rows()))\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=60)
