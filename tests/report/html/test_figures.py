"""The figures: what stands in them, and nothing that the page does not style."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
from markupsafe import Markup
from tests.page_reader import Page

from flatout.core.records.evidence import Evidence
from flatout.core.records.failure import Goodput
from flatout.core.records.finding import Diagnosis
from flatout.core.records.memory import Memory
from flatout.report.html.goodput import goodput_page
from flatout.report.html.memory import memory_svg
from flatout.report.html.roofline import roofline_svg
from flatout.report.html.steps import steps_svg
from flatout.report.html.timeline import timeline_svg

pytestmark = pytest.mark.slow

change = msgspec.structs.replace


def texts(svg: Markup | None, tag: str) -> list[str]:
    assert svg is not None
    return [e.text or "" for e in ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}")]


def test_a_bar_tells_name_time_line_and_cause(full: Evidence, diagnosis: Diagnosis) -> None:
    tips = texts(timeline_svg(full, diagnosis.findings), "title")

    assert "waiting for data: 9.10 ms, a wait" in tips
    assert any(t.startswith("aten.bmm: 400 us; model.py:48: weights = ") and t.endswith("; cause 1") for t in tips)
    assert "cudaStreamSynchronize: 900 us, a wait; train.py:77: optimizer.step(); cause 3" in tips


def test_the_timeline_has_a_row_for_each_track_there_is(full: Evidence, diagnosis: Diagnosis) -> None:
    shown = texts(timeline_svg(full, diagnosis.findings), "text")
    assert {"phase", "operators", "causes", "device", "copies"} <= set(shown)

    assert full.timeline is not None
    on_host = change(full.timeline, spans=tuple(s for s in full.timeline.spans if s.track in ("phase", "host")))
    shown = texts(timeline_svg(change(full, timeline=on_host), ()), "text")
    assert {"causes", "device", "copies"}.isdisjoint(shown)


def test_no_spans_no_timeline(evidence: Evidence) -> None:
    assert timeline_svg(evidence, ()) is None


def test_each_hot_line_is_a_point_with_its_number(full: Evidence, diagnosis: Diagnosis) -> None:
    svg = roofline_svg(full, diagnosis.hot_lines)

    assert [tip.partition(":")[0] for tip in texts(svg, "title")] == ["3", "1", "2"]
    labels = texts(svg, "text")
    assert {"1", "2", "3", "lines that compute", "lines that only move data", "memory 14.0 GB/s"} <= set(labels)
    assert any(label.startswith("float32") for label in labels)


def test_no_machine_no_roofline(full: Evidence, diagnosis: Diagnosis) -> None:
    assert roofline_svg(change(full, machine=None), diagnosis.hot_lines) is None


def test_the_memory_curve_marks_its_peak(full: Evidence) -> None:
    memory: Memory = full.memory[0]
    svg = memory_svg(memory, name="memory0")

    assert "the most in this step: 1.15 GiB, in backward" in texts(svg, "title")
    assert {"1 GiB", "512 MiB", "0 B", "forward", "backward"} <= set(texts(svg, "text"))
    assert memory_svg(change(memory, curve=memory.curve[:1]), name="memory0") is None


def test_colours_are_variables_and_fonts_the_pages_own(full: Evidence, diagnosis: Diagnosis) -> None:
    figures = (
        timeline_svg(full, diagnosis.findings),
        roofline_svg(full, diagnosis.hot_lines),
        memory_svg(full.memory[0], name="memory0"),
        steps_svg(full.steps),
    )

    for svg in figures:
        assert svg is not None
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert "font-family" not in svg
        assert "var(--line)" in svg


def test_the_label_of_a_figure_is_escaped_once() -> None:
    found = {
        "save & <restart>": Goodput(goodput=0.9, saving=0.05, lost=0.03, down=0.02, interval_s=600.0, mtbf_s=3600.0)
    }
    page = Page(goodput_page({"save & <restart>": [(8, 0.9), (16, 0.8)]}, title="Goodput", found=found))

    [label] = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert label == "Goodput at 16 devices: save & <restart> 80.0%"
