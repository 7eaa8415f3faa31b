"""What is known of an engine on this machine: its latencies from Python and in C, their floor, and its errors against float64."""

from __future__ import annotations

import ctypes
import platform
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from flatout.blocks.inference.native.buffers import DTYPES
from flatout.blocks.inference.native.library import FunctionTable
from flatout.blocks.inference.native.rollout import (
    Events,
    Places,
    input_places,
    largest_errors,
    random_events,
    run,
    tensors_of,
)
from flatout.core.errors import NativeError
from flatout.core.records.native import Latency, NativeLayer, NativeManifest, NativeReport
from flatout.core.runtime.c_compiler import (
    CompilerRun,
    build_shared_library,
    find_compiler,
    native_flags,
)
from flatout.machine.measure.probe import identify

NUM_COMPARED: Final = 200
"""Events of the rollout that errors are taken from."""
_NUM_DIFFERENT: Final = 256
"""Different inputs of a latency's events, taken in turn."""
_WARM_FRACTION: Final = 0.1
_LEAST_BYTES: Final = 4096
"""Read by the floor's loop: fewer would measure the loop, and lie in the same cache."""
_READ_NS: Final = 1_000_000
"""Of one sample of that loop."""
_NUM_SAMPLES: Final = 15


class SteppedEngine(Protocol):
    """An engine, of either back end."""

    @property
    def manifest(self) -> NativeManifest: ...

    @property
    def isa(self) -> str: ...

    @property
    def step(self) -> Any: ...

    def copy(self) -> Any: ...


def measure_engine(
    engine: SteppedEngine,
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    state: str | Sequence[str] = (),
    layers: Sequence[NativeLayer] = (),
    compiler: str = "",
    build_s: float = 0.0,
    library: FunctionTable | None = None,
    packed: bytes = b"",
    num_events: int = 20_000,
    seed: int = 0,
) -> NativeReport:
    """Step a copy of the engine and fill a report; the engine's own state stays as it is. Takes a second or two.

    `library` and `packed` weights are those of a native engine: without them nothing is measured in C. What cannot be measured
    stands in `unknown` of the report, with the reason.
    """
    where, examples = input_places(module, example_inputs, state), tensors_of(example_inputs)
    events = random_events(module, examples, where, num_events=_NUM_DIFFERENT, seed=seed)
    unknown: dict[str, str] = {}
    native = floor_s = None
    read_bytes = sum(layer.weight_bytes for layer in layers) or engine.manifest.weights_bytes
    try:
        meter = Meter()
        floor_s = meter.floor_s(read_bytes)
        if library is None:
            unknown["native"] = "the engine has no native library"
        else:
            native = meter.latency(library, packed, events, engine.manifest, num_events)
    except NativeError as e:
        unknown["native"] = unknown["floor_s"] = str(e).partition("\n")[0]
    errors: dict[str, float] = {}
    eager_errors: dict[str, float] = {}
    try:
        errors, eager_errors = rollout_errors(engine, module, examples, where, seed=seed)
    except NativeError as e:
        unknown["errors"] = str(e)
    state_bytes = library.state_bytes if library else sum(port.num_bytes for port in engine.manifest.state)
    return NativeReport(
        hardware=identify("cpu").cpu_model,
        isa=engine.isa,
        compiler=compiler,
        build_s=build_s,
        layers=tuple(layers),
        weight_bytes=engine.manifest.weights_bytes,
        state_bytes=state_bytes,
        floor_s=floor_s,
        python=python_latency(engine, events, num_events=num_events),
        native=native,
        errors=errors,
        eager_errors=eager_errors,
        unknown=unknown,
    )


def python_latency(engine: SteppedEngine, events: Events, *, num_events: int) -> Latency:
    """Latencies of `step` with buffers for its outputs, on a copy of the engine; the clock's own cost is taken off.

    Arguments are NumPy arrays, or tensors where there is no NumPy.
    """
    own = engine.copy()
    arguments_of_events = [tuple(map(_argument, event)) for event in events]
    outs = tuple(_argument(torch.empty(port.shape, dtype=DTYPES[port.dtype])) for port in engine.manifest.outputs)
    out = outs[0] if len(outs) == 1 else outs
    step, clock, number = own.step, time.perf_counter_ns, len(arguments_of_events)
    times = []
    for at in range(_with_warm(num_events)):
        arguments = arguments_of_events[at % number]
        start = clock()
        step(*arguments, out=out)
        times.append(clock() - start)
    empty = []
    for _ in range(1000):
        start = clock()
        empty.append(clock() - start)
    return _latency(times, empty, num_events)


def rollout_errors(
    engine: SteppedEngine,
    module: nn.Module,
    examples: Sequence[Tensor],
    where: Places,
    *,
    seed: int,
    num_events: int = NUM_COMPARED,
) -> tuple[dict[str, float], dict[str, float]]:
    """Largest errors of the engine and of eager float32 by output, relative to the largest number, over carried events.

    Raises NativeError for a module that cannot run in float64.
    """
    events = random_events(module, examples, where, num_events=num_events, seed=seed + 1)
    start = [examples[at] for at in where.carried]
    try:
        exact = run(module, events, where, dtype=torch.float64, start=start)
    except RuntimeError as e:
        raise NativeError(f"{type(module).__name__} cannot run in float64: {str(e).partition(chr(10))[0]}") from e
    eager = run(module, events, where, dtype=torch.float32, start=start)
    ports, own, found = engine.manifest.outputs, engine.copy(), []
    own.reset()
    for event in events:
        outputs = tuple(torch.empty(port.shape, dtype=DTYPES[port.dtype]) for port in ports)
        own.step(*event, out=outputs if len(outputs) > 1 else outputs[0])
        found.append(outputs)
    names = [port.name for port in ports]
    return (
        dict(zip(names, largest_errors(found, exact), strict=True)),
        dict(zip(names, largest_errors(eager, exact), strict=True)),
    )


class Meter:
    """The measuring loops in C, compiled for this machine. NativeError where there is no compiler."""

    def __init__(self) -> None:
        # Held open by the process once it is loaded; the file may go.
        with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
            loops = ctypes.CDLL(str(_compiled(Path(folder))))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._read, self._events, self._clock = (
            loops.flatout_measure_read,
            loops.flatout_measure_events,
            loops.flatout_measure_clock,
        )
        self._read.restype, self._read.argtypes = number, (pointer, ctypes.c_uint64, number, pointer)
        self._events.argtypes = (*[pointer] * 6, number, *[pointer] * 2, number, pointer, number)
        self._clock.argtypes = (pointer, number)

    def floor_s(self, num_bytes: int) -> float:
        """Seconds to read so many bytes, over and over, from the smallest cache that holds them."""
        size = -(-max(num_bytes, _LEAST_BYTES) // 512) * 512
        buffer, total = _memory(size), ctypes.c_uint64()

        def read_ns(passes: int) -> int:
            return max(1, int(self._read(buffer.data_ptr(), size, passes, ctypes.byref(total))))

        passes, best = 1, read_ns(1)
        while best < _READ_NS:
            passes *= 2
            best = read_ns(passes)
        best = min(best, *(read_ns(passes) for _ in range(_NUM_SAMPLES)))
        return best * 1e-9 / passes * num_bytes / size

    def latency(
        self, library: FunctionTable, packed: bytes, events: Events, manifest: NativeManifest, num_events: int
    ) -> Latency:
        """Latencies of single events, each between two readings of the clock, whose own cost is taken off."""
        weights = _memory(len(packed))
        ctypes.memmove(weights.data_ptr(), packed, len(packed))
        state, work = _memory(library.state_bytes), _memory(library.work_bytes)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library.reset)(state.data_ptr())
        inputs = [torch.stack(list(column)).contiguous() for column in zip(*events, strict=True)]
        outputs = [_memory(port.num_bytes) for port in manifest.outputs]
        sizes = torch.tensor([port.num_bytes for port in manifest.inputs], dtype=torch.int64)
        ins, outs = (torch.tensor([t.data_ptr() for t in of], dtype=torch.int64) for of in (inputs, outputs))
        times, empty = torch.zeros(_with_warm(num_events), dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)
        read = (t.data_ptr() for t in (weights, state, work, ins, sizes))
        current = torch.empty_like(ins)
        written = current.data_ptr(), outs.data_ptr()
        self._events(library.step, *read, len(inputs), *written, len(events), times.data_ptr(), len(times))
        self._clock(empty.data_ptr(), len(empty))
        return _latency(times.tolist(), empty.tolist(), num_events)


def _memory(size: int) -> Tensor:
    """Bytes at a multiple of 64, where torch's memory begins; none of it is left untouched."""
    return torch.full((size + 64,), 0, dtype=torch.uint8)


def _compiled(folder: Path) -> Path:
    out = folder / "measure.so"
    # For loads as wide as this machine has them; on ARM they have one width.
    flags = ("-std=gnu11", "-O3", "-fPIC", *(native_flags() if platform.machine() in ("x86_64", "AMD64") else ()))
    with as_file(files("flatout.blocks.inference.native") / "c" / "measure.c") as source:
        build_shared_library(source, out, [CompilerRun("loops", flags)], compiler=find_compiler(), link_flags=())
    return out


def _latency(times_ns: Sequence[int], empty_ns: Sequence[int], num_events: int) -> Latency:
    """Of the last `num_events`, without what reading the clock takes."""
    clock_ns = median(empty_ns)
    times_s = sorted(max(0.0, taken - clock_ns) * 1e-9 for taken in times_ns[-num_events:])

    def at(fraction: float) -> float:
        return times_s[min(len(times_s) - 1, int(fraction * len(times_s)))]

    return Latency(p50_s=at(0.5), p99_s=at(0.99), p999_s=at(0.999), num_events=len(times_s))


def _with_warm(num_events: int) -> int:
    return num_events + max(1, int(_WARM_FRACTION * num_events))


def _argument(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy() if find_spec("numpy") else tensor.contiguous()
