"""One step as a trace in Chrome's format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import gzip
from typing import Final

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.span import Span
from flatout.report.sanitise import inert, place_of

_HOST, _DEVICE = 1, 2
_TRACKS: Final = {
    "phase": (_HOST, 1, "phases"),
    "host": (_HOST, 2, "operators"),
    "device": (_DEVICE, 3, "kernels"),
    "copy": (_DEVICE, 4, "copies"),
}


_TraceEvent = dict[str, object]
"""One entry of `traceEvents`. `ph` is 'X' for a span, 'M' for a name; `ts` and `dur` are microseconds."""


def chrome_trace(evidence: Evidence, *, compress: bool = False) -> bytes:
    """The spans of the step's timeline as JSON (UTF-8), packed with gzip when `compress`; no events without a timeline."""
    spans = evidence.timeline.spans if evidence.timeline is not None else ()
    names = [event for track in dict.fromkeys(s.track for s in spans) for event in _names(track)]
    trace = {
        "traceEvents": [*names, *(_span(evidence, s) for s in spans)],
        "displayTimeUnit": "ms",
        "otherData": {"written by": "flatout", "torch": inert(evidence.workload.torch)},
    }
    data = msgspec.json.encode(trace)
    return gzip.compress(data, mtime=0) if compress else data


def _names(track: str) -> list[_TraceEvent]:
    process, thread, name = _place(track)
    device = "host" if process == _HOST else "device"
    args = {
        "process_name": {"name": device},
        "thread_name": {"name": name},
        "thread_sort_index": {"sort_index": thread},
    }
    return [
        {"name": key, "ph": "M", "pid": process, "tid": 0 if key == "process_name" else thread, "args": value}
        for key, value in args.items()
    ]


def _span(evidence: Evidence, span: Span) -> _TraceEvent:
    process, thread, _ = _place(span.track)
    source = evidence.source_of(span.source)
    args: dict[str, str | bool] = {"waits": True} if span.is_wait else {}
    if source is not None:
        args |= {"line": place_of(source, cwd=evidence.workload.cwd), "source": inert(source.text)}
    return {
        "name": inert(span.name),
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": 1e6 * span.start_s,
        "dur": 1e6 * span.duration_s,
        "cat": "wait" if span.is_wait else inert(span.track),
        "args": args,
    }


def _place(track: str) -> tuple[int, int, str]:
    return _TRACKS.get(track, (_HOST, 9, inert(track)))
