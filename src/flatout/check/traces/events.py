"""What a profiler's events mean, whoever recorded them. Times are nanoseconds on one clock, the host's and the device's alike."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from flatout.check.traces.convolutions import Convolved
from flatout.core.records.span import Span

WorkKind = Literal["kernel", "copy", "set", "collective"]


ELEMENT_BYTES: Final = {
    "complex128": 16, "float64": 8, "int64": 8, "uint64": 8, "complex64": 8,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


class DeviceWork(NamedTuple):
    """One thing that a device did. `correlation` is the number of the host's call that launched it, 0 when unknown."""

    start_ns: int
    end_ns: int
    kind: WorkKind
    name: str
    device: int = 0
    stream: int = 0
    correlation: int = 0
    bytes: int = 0
    num_blocks: int = 0
    block_threads: int = 0
    registers: int = 0
    shared_bytes: int = 0
    collective: str = ""
    group_size: int = 0


class HostCall(NamedTuple):
    """One call of the device's runtime or driver by the host."""

    start_ns: int
    end_ns: int
    name: str
    correlation: int
    thread: int | str


class HostOp(NamedTuple):
    """One operator, annotation or Python function on a host thread. What was not recorded is empty, -1 or 0."""

    start_ns: int
    end_ns: int
    name: str
    thread: int | str
    sequence: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    collective: str = ""
    bytes: int = 0
    group_size: int = 0
    convolved: Convolved = Convolved()


def span_of(
    event: DeviceWork | HostCall | HostOp, track: str, *, origin_ns: int, source: int = -1, is_wait: bool = False
) -> Span:
    """The event in the timeline of a step that began at `origin_ns`."""
    return Span(
        track=track,
        name=event.name,
        start_s=(event.start_ns - origin_ns) * 1e-9,
        duration_s=(event.end_ns - event.start_ns) * 1e-9,
        source=source,
        is_wait=is_wait,
    )


class CallPlace(NamedTuple):
    """Where a moment of the host belongs: the user's line (an index), the step's phase, the operator."""

    source: int = -1
    phase: str = "other"
    op: str = ""


class DeviceFacts(NamedTuple):
    """What is known of the device: what wave quantisation and resident blocks need; None where the trace has no such figure."""

    name: str = ""
    num_sms: int | None = None
    threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
