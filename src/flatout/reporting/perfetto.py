"""One step as a trace in Chrome's format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
from typing import Final

import msgspec

from flatout.records.evidence import Evidence
from flatout.records.record import Record
from flatout.records.span import Span
from flatout.reporting.inert import inert, place_of

_HOST, _DEVICE = 1, 2
_TRACKS: Final = {
    "phase": (_HOST, 1, "phases"),
    "host": (_HOST, 2, "operators"),
    "device": (_DEVICE, 3, "kernels"),
    "copy": (_DEVICE, 4, "copies"),
}


class _Event(Record, frozen=True, kw_only=True):
    """One entry of `traceEvents`. `ph` is 'X' for a span, 'M' for a name; `ts` and `dur` are microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, str | int | bool] = {}


class _Trace(Record, frozen=True, kw_only=True):
    """The file."""

    traceEvents: tuple[_Event, ...]
    displayTimeUnit: str = "ms"
    otherData: dict[str, str] = {}


def chrome_trace(evidence: Evidence, *, compress: bool = False) -> bytes:
    """The spans of the step's timeline as JSON (UTF-8), packed with gzip when `compress`; no events without a timeline."""
    spans = evidence.timeline.spans if evidence.timeline is not None else ()
    tracks = dict.fromkeys(s.track for s in spans)
    names = [event for track in tracks for event in _names(track)]
    trace = _Trace(
        traceEvents=(*names, *(_span(evidence, s) for s in spans)),
        otherData={"written by": "flatout", "torch": inert(evidence.workload.torch)},
    )
    data = msgspec.json.encode(trace)
    return gzip.compress(data, mtime=0) if compress else data


def _names(track: str) -> tuple[_Event, ...]:
    process, thread, name = _place(track)
    device = "host" if process == _HOST else "device"
    return (
        _Event(name="process_name", ph="M", pid=process, tid=0, args={"name": device}),
        _Event(name="thread_name", ph="M", pid=process, tid=thread, args={"name": name}),
        _Event(name="thread_sort_index", ph="M", pid=process, tid=thread, args={"sort_index": thread}),
    )


def _span(evidence: Evidence, span: Span) -> _Event:
    process, thread, _ = _place(span.track)
    source = evidence.source_of(span.source)
    args: dict[str, str | int | bool] = {"waits": True} if span.is_wait else {}
    if source is not None:
        args |= {"line": place_of(source, cwd=evidence.workload.cwd), "source": inert(source.text)}
    return _Event(
        name=inert(span.name),
        ph="X",
        pid=process,
        tid=thread,
        ts=1e6 * span.start_s,
        dur=1e6 * span.duration_s,
        cat="wait" if span.is_wait else inert(span.track),
        args=args,
    )


def _place(track: str) -> tuple[int, int, str]:
    return _TRACKS.get(track, (_HOST, 9, inert(track)))
