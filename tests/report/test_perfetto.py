"""The step as a trace."""

from __future__ import annotations

import gzip
import json

import msgspec
from tests.page_reader import spoiled

from flatout.core.records.evidence import Evidence
from flatout.core.records.span import Span, StepTimeline
from flatout.report.perfetto import chrome_trace

change = msgspec.structs.replace


def timed(evidence: Evidence) -> Evidence:
    spans = (
        Span(track="phase", name="forward", start_s=0.001, duration_s=0.010),
        Span(track="host", name="aten.bmm", start_s=0.002, duration_s=0.003, source=0),
        Span(track="device", name="gemm", start_s=0.003, duration_s=0.003, source=0),
        Span(track="host", name="cudaStreamSynchronize", start_s=0.008, duration_s=0.001, is_wait=True),
    )
    return change(evidence, timeline=StepTimeline(duration_s=0.0382, spans=spans))


def test_spans_become_complete_events_in_microseconds(evidence: Evidence) -> None:
    trace = json.loads(chrome_trace(timed(evidence)))

    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["forward", "aten.bmm", "gemm", "cudaStreamSynchronize"]
    assert (spans[1]["ts"], spans[1]["dur"]) == (2000.0, 3000.0)
    assert spans[1]["args"]["line"] == "model.py:48"
    assert spans[1]["args"]["source"].startswith("weights = torch.softmax")
    assert spans[3]["args"] == {"waits": True}
    assert spans[0]["pid"] == spans[1]["pid"] != spans[2]["pid"]


def test_every_track_has_a_name(evidence: Evidence) -> None:
    trace = json.loads(chrome_trace(timed(evidence)))

    tracks = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert tracks == named


def test_a_packed_trace_is_the_same_and_reproducible(evidence: Evidence) -> None:
    packed = chrome_trace(timed(evidence), compress=True)

    assert gzip.decompress(packed) == chrome_trace(timed(evidence))
    assert packed == chrome_trace(timed(evidence), compress=True)


def test_no_timeline_is_an_empty_trace(evidence: Evidence) -> None:
    assert json.loads(chrome_trace(evidence))["traceEvents"] == []


def test_hostile_names_stay_names(evidence: Evidence) -> None:
    trace = json.loads(chrome_trace(spoiled(timed(evidence), "</script> \x1b[31m\udcff")))

    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"} == {"</script> \\udcff"}
