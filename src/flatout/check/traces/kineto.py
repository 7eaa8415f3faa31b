"""Reads the file that torch.profiler writes (Kineto's Chrome trace, .json or .json.gz) into neutral events. Needs no torch.

A trace that was cut off in the middle, holds numbers that are no JSON (inf, nan) or bytes that are no UTF-8 is read as far as it
goes, and says so.
"""

from __future__ import annotations

import re
import zlib
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from flatout.check.traces.convolutions import Convolved, convolved
from flatout.check.traces.events import DeviceFacts, DeviceWork, HostCall, HostOp
from flatout.check.traces.kernel_names import collective_of, kernel_kind
from flatout.core.errors import RecordError

MOST_BYTES: Final = 3 << 30
"""Larger traces are refused: their events would not fit an ordinary machine's memory."""
_CHUNK: Final = 16 << 20
_NO_NUMBER: Final = re.compile(rb"(:\s*)[-+]?(?:inf(?:inity)?|nan)\b", re.IGNORECASE)
_ENDS_TRIED: Final = 12
_MOST_US: Final = 1e16
"""Three hundred years: later events, and longer ones, are damage."""
_MOST_RATIO: Final = 200
"""What gzip makes of traces is 10 to 40 times smaller (five traces of torch.profiler); a file of zeros, 1000 times."""
_ANY_BYTES: Final = 64 << 20
"""Unpacked, that is no matter, however small it was."""

_DTYPES: Final = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "bool": "bool",
    "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16", "signed char": "int8",
    "long unsigned int": "uint64", "unsigned int": "uint32", "short unsigned int": "uint16", "unsigned char": "uint8",
    "c10::complex<c10::Half>": "complex32", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2", "c10::Float8_e8m0fnu": "float8_e8m0fnu",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz", "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
}  # fmt: skip
"""Names of C++ that the profiler writes for the dtypes of tensors; an argument of another type is no tensor."""
_ELEMENT_BYTES: Final = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1}

_Number = float | int | str | None
T = TypeVar("T")


class _Args(msgspec.Struct, gc=False):
    correlation: int = 0
    device: _Number = 0
    stream: _Number = 0
    bytes: _Number = 0
    grid: list[int] = []
    block: list[int] = []
    registers: _Number = msgspec.field(name="registers per thread", default=0)
    shared: _Number = msgspec.field(name="shared memory", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b""))
    collective: str = msgspec.field(name="Collective name", default="")
    elements: _Number = msgspec.field(name="In msg nelems", default=0)
    dtype: str = ""
    group_size: _Number = msgspec.field(name="Group size", default=0)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = ""
    name: str = ""
    tid: int | str | None = 0
    ts: float | None = None
    dur: float | None = 0.0
    args: _Args | None = None


class _Distributed(msgspec.Struct):
    backend: str = ""
    rank: int = 0
    world_size: int = 1


class _Device(msgspec.Struct):
    name: str = ""
    sms: int | None = msgspec.field(name="numSms", default=None)
    threads: int | None = msgspec.field(name="maxThreadsPerMultiprocessor", default=None)
    registers: int | None = msgspec.field(name="regsPerMultiprocessor", default=None)
    shared: int | None = msgspec.field(name="sharedMemPerMultiprocessor", default=None)


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    devices: list[_Device] = msgspec.field(name="deviceProperties", default=[])
    distributed: _Distributed | None = msgspec.field(name="distributedInfo", default=None)
    host_name: str = ""
    with_stack: int = 0
    record_shapes: int = 0


class _LooseFile(msgspec.Struct):
    """The same when some event does not look as expected: events one by one."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    devices: msgspec.Raw = msgspec.field(name="deviceProperties", default=msgspec.Raw(b"[]"))
    distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=msgspec.Raw(b"null"))


class TraceFile:
    """One rank's trace as neutral events. Times are nanoseconds; those of the epoch are `base_ns` later (0: not known)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.base_ns = 0
        self.rank: int | None = None
        self.world_size = 1
        self.backend = ""
        self.host = ""
        self.has_shapes = False
        self.has_stacks = False
        self.devices: dict[int, DeviceFacts] = {}
        self.work: list[DeviceWork] = []
        self.calls: list[HostCall] = []
        self.operators: list[HostOp] = []
        self.annotations: list[HostOp] = []
        self.functions: list[HostOp] = []
        self.notes: list[str] = []


def is_trace(data: bytes) -> bool:
    """Whether these bytes look like a Chrome trace: an object with `traceEvents`, or a bare list."""
    return data[:2] == b"\x1f\x8b" or data.lstrip()[:1] == b"[" or b'"traceEvents"' in data


def read_trace(path: Path) -> TraceFile:
    """The trace in a file.

    Raises RecordError when the file cannot be read, is too large, or is no trace of torch.profiler.
    """
    try:
        raw = path.read_bytes() if path.stat().st_size <= MOST_BYTES else b""
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; give a trace that torch.profiler exported") from e
    if not raw and path.stat().st_size:
        raise _too_large(path)
    return trace_of(raw, path)


def trace_of(raw: bytes, path: Path) -> TraceFile:
    """The trace in the bytes of a file, packed with gzip or not; `path` is for messages."""
    trace = TraceFile(str(path))
    if raw[:2] == b"\x1f\x8b":
        raw = _unpacked(raw, path, trace)
    file = _decoded(raw, path, trace)
    del raw
    _fill(trace, file)
    if not (trace.work or trace.operators or trace.annotations or trace.functions):
        raise RecordError(
            f"'{path}' holds {len(file.events)} events, but none of torch.profiler (operators, kernels, annotations); "
            "export with prof.export_chrome_trace(...)"
        )
    return trace


def _too_large(path: Path) -> RecordError:
    return RecordError(
        f"'{path}' is larger than {MOST_BYTES >> 30} GiB unpacked; record fewer steps: "
        "torch.profiler.schedule(wait=5, warmup=1, active=3), and without with_stack"
    )


def _unpacked(raw: bytes, path: Path, trace: TraceFile) -> bytes:
    """The text inside gzip; of a damaged or cut file what can be had."""
    parts: list[bytes] = []
    total, num_packed = 0, len(raw)
    try:
        while raw:
            unzip = zlib.decompressobj(31)
            while raw and not unzip.eof:
                part = unzip.decompress(raw, _CHUNK)
                raw = unzip.unconsumed_tail
                parts.append(part)
                total += len(part)
                if total > MOST_BYTES:
                    raise _too_large(path)
                if total > max(_ANY_BYTES, _MOST_RATIO * num_packed):
                    raise RecordError(
                        f"'{path}' has {num_packed} bytes and is more than {_MOST_RATIO} times that unpacked: no trace is; "
                        "export it again, or unpack it yourself"
                    )
                if not part and not raw:
                    break
            if not unzip.eof:
                trace.notes.append("the trace file is cut off: what follows is missing")
                break
            raw = unzip.unused_data
    except zlib.error as e:
        if not parts:
            raise RecordError(f"'{path}' is no readable gzip file ({e}); copy it again") from e
        trace.notes.append(f"the trace file is damaged ({e}): what follows is missing")
    return b"".join(parts)


def _decoded(raw: bytes, path: Path, trace: TraceFile) -> _File:
    start = raw[:64].lstrip()[:1]
    if start == b"[":
        raw = b'{"traceEvents":' + raw.rstrip() + (b"}" if raw.rstrip().endswith(b"]") else b"")
    elif start != b"{" or b'"traceEvents"' not in raw:
        raise RecordError(
            f"'{path}' is no trace of torch.profiler and no report of flatout: it has neither 'traceEvents' nor 'evidence'; "
            "give what prof.export_chrome_trace(...) or `flatout check --json` wrote"
        )
    first = _try(raw)
    if first is not None:
        return first
    repaired = _NO_NUMBER.sub(rb"\1null", raw).decode("utf-8", errors="replace").encode()
    found = _try(repaired) or _cut(repaired, trace)
    if found is None:
        raise RecordError(f"'{path}' is damaged: {_complaint(repaired)}; export the trace again")
    return found


def _try(raw: bytes) -> _File | None:
    """The file, or None when it is no JSON. Events that look strange are left out one by one."""
    try:
        return msgspec.json.decode(raw, type=_File, strict=False)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    try:
        loose = msgspec.json.decode(raw, type=_LooseFile, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    decoder = msgspec.json.Decoder(_Event, strict=False)
    events = [event for item in loose.events if (event := _as(decoder, item)) is not None]
    devices = _as(msgspec.json.Decoder(list[_Device], strict=False), loose.devices)
    distributed = _as(msgspec.json.Decoder(_Distributed, strict=False), loose.distributed)
    return _File(events=events, base_ns=loose.base_ns, devices=devices or [], distributed=distributed)


def _as(decoder: msgspec.json.Decoder[T], item: msgspec.Raw) -> T | None:
    try:
        return decoder.decode(item)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _cut(raw: bytes, trace: TraceFile) -> _File | None:
    """The file up to its last whole event."""
    end = len(raw)
    for _ in range(_ENDS_TRIED):
        end = raw.rfind(b"}", 0, end)
        if end < 0:
            return None
        found = _try(raw[: end + 1] + b"]}")
        if found is not None:
            if not any("cut off" in n or "damaged" in n for n in trace.notes):
                trace.notes.append("the trace file is cut off: what follows is missing")
            return found
    return None


def _complaint(raw: bytes) -> str:
    try:
        msgspec.json.decode(raw, type=_File, strict=False)
    except (msgspec.DecodeError, RecursionError) as e:
        return str(e)
    return "it cannot be read"


def _fill(trace: TraceFile, file: _File) -> None:
    trace.base_ns, trace.host = file.base_ns, file.host_name
    if file.distributed is not None:
        trace.rank, trace.world_size = file.distributed.rank, file.distributed.world_size
        trace.backend = file.distributed.backend
    trace.devices = {
        i: DeviceFacts(d.name, d.sms, d.threads, d.registers, d.shared) for i, d in enumerate(file.devices)
    }
    for event in file.events:
        duration = event.dur or 0.0
        # written so that NaN, which a text in a number's place may say, is not within
        if event.ph != "X" or event.ts is None or not (abs(event.ts) <= _MOST_US and abs(duration) <= _MOST_US):
            continue
        start = round(event.ts * 1000)
        end = start + round(duration * 1000)
        _place(trace, event, start, max(start, end))
    trace.has_stacks = bool(trace.functions)
    trace.has_shapes = any(o.shapes for o in trace.operators)


def _place(trace: TraceFile, event: _Event, start: int, end: int) -> None:
    thread = event.tid if event.tid is not None else 0
    match (event.cat or "").lower():
        case "cpu_op" | "operator":
            is_annotation = event.name.startswith(("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)"))
            (trace.annotations if is_annotation else trace.operators).append(_host_op(event, start, end, thread))
        case "user_annotation":
            trace.annotations.append(_host_op(event, start, end, thread))
        case "python_function":
            trace.functions.append(HostOp(start, end, event.name, thread))
        case "cuda_runtime" | "cuda_driver" | "runtime" | "hip_runtime" | "privateuse1_runtime":
            correlation = event.args.correlation if event.args is not None else 0
            trace.calls.append(HostCall(start, end, event.name, correlation, thread))
        case "kernel":
            trace.work.append(_kernel(event, start, end))
        case "gpu_memcpy" | "memcpy":
            trace.work.append(_moved(event, start, end)._replace(kind="copy"))
        case "gpu_memset" | "memset":
            trace.work.append(_moved(event, start, end)._replace(kind="set"))


def _host_op(event: _Event, start: int, end: int, thread: int | str) -> HostOp:
    args = event.args
    if args is None:
        return HostOp(start, end, event.name, thread)
    shapes, dtypes = _tensors(args) if args.dims else ((), ())
    return HostOp(
        start_ns=start,
        end_ns=end,
        name=event.name,
        thread=thread,
        sequence=args.sequence,
        shapes=shapes,
        dtypes=dtypes,
        collective=args.collective,
        bytes=_message_bytes(args),
        group_size=_int(args.group_size),
        convolved=convolved(event.name, shapes, _values(args)) if shapes and "conv" in event.name else Convolved(),
    )


def _values(args: _Args) -> list[str]:
    """The arguments that are no tensors, as text; empty texts in the places of tensors."""
    try:
        return msgspec.json.decode(args.values, type=list[str]) if args.values else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _tensors(args: _Args) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Shapes and dtypes of the arguments that are tensors; members of a list of tensors one by one."""
    try:
        dims = msgspec.json.decode(args.dims, type=list[list[Any]], strict=False)
        types = msgspec.json.decode(args.types, type=list[str]) if args.types else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return (), ()
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    for i, size in enumerate(dims):
        kind = types[i] if i < len(types) else ""
        if kind == "TensorList" or (size and isinstance(size[0], list)):
            shapes += [_sizes(s) for s in size if isinstance(s, list)]
            dtypes += [""] * len(size)
        elif kind in _DTYPES or (not types and size):
            shapes.append(_sizes(size))
            dtypes.append(_DTYPES.get(kind, ""))
    return tuple(shapes), tuple(dtypes)


def _sizes(found: list[Any]) -> tuple[int, ...]:
    return tuple(n for n in found if isinstance(n, int) and abs(n) < 1 << 63)


def _moved(event: _Event, start: int, end: int) -> DeviceWork:
    args = event.args or _Args()
    return DeviceWork(
        start_ns=start,
        end_ns=end,
        kind="kernel",
        name=event.name,
        device=_int(args.device),
        stream=_int(args.stream),
        correlation=args.correlation,
        bytes=_int(args.bytes),
    )


def _kernel(event: _Event, start: int, end: int) -> DeviceWork:
    args = event.args or _Args()
    kind = kernel_kind(event.name)
    collective = ""
    if kind == "collective":
        collective = {"allreduce": "all_reduce"}.get(args.collective, args.collective) or collective_of(event.name)
    return _moved(event, start, end)._replace(
        kind=kind,
        bytes=_message_bytes(args),
        num_blocks=prod(args.grid) if args.grid else 0,
        block_threads=prod(args.block) if args.block else 0,
        registers=_int(args.registers),
        shared_bytes=_int(args.shared),
        collective=collective,
        group_size=_int(args.group_size),
    )


def _message_bytes(args: _Args) -> int:
    """Bytes that one rank puts into a collective, 0 when unknown."""
    return _int(args.elements) * _ELEMENT_BYTES.get(args.dtype, 0)


def _int(value: _Number) -> int:
    try:
        return int(float(value)) if value not in (None, "") else 0
    except (ValueError, OverflowError):
        return 0
