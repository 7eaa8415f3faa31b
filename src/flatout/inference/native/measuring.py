"""What is known of an engine on this machine: its latencies from Python and in C, their floor, and its errors against float64."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from flatout.errors import NativeError
from flatout.inference.native.buffers import DTYPES
from flatout.inference.native.compiler import find_compiler, shortened
from flatout.inference.native.library import Library, Table
from flatout.inference.native.rollout import Events, Places, largest_errors, places, random_events, run, tensors_of
from flatout.measure.probe import identify
from flatout.records.native import Latency, NativeLayer, NativeManifest, NativeReport

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


class Steps(Protocol):
    """An engine, of either back end."""

    @property
    def manifest(self) -> NativeManifest: ...

    @property
    def isa(self) -> str: ...

    @property
    def step(self) -> Any: ...

    def copy(self) -> Any: ...


def measured(
    engine: Steps,
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    state: str | Sequence[str] = (),
    layers: Sequence[NativeLayer] = (),
    compiler: str = "",
    build_s: float = 0.0,
    library: Library | None = None,
    packed: bytes = b"",
    num_events: int = 20_000,
    seed: int = 0,
) -> NativeReport:
    """Step a copy of the engine and fill a report; the engine's own state stays as it is. Takes a second or two.

    `library` and `packed` weights are those of a native engine: without them nothing is measured in C. What cannot be measured
    stands in `unknown` of the report, with the reason.
    """
    where, examples = places(module, example_inputs, state), tensors_of(example_inputs)
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


def python_latency(engine: Steps, events: Events, *, num_events: int) -> Latency:
    """Of `step` with buffers for its outputs, on a copy of the engine; the clock's own cost is taken off.

    Arguments are NumPy arrays, or tensors where there is no NumPy.
    """
    own = engine.copy()
    given = [tuple(map(_argument, event)) for event in events]
    outs = tuple(_argument(torch.empty(port.shape, dtype=DTYPES[port.dtype])) for port in engine.manifest.outputs)
    out = outs[0] if len(outs) == 1 else outs
    step, clock, number = own.step, time.perf_counter_ns, len(given)
    times = []
    for at in range(_with_warm(num_events)):
        arguments = given[at % number]
        start = clock()
        step(*arguments, out=out)
        times.append(clock() - start)
    empty = []
    for _ in range(1000):
        start = clock()
        empty.append(clock() - start)
    return _latency(times, empty, num_events)


def rollout_errors(
    engine: Steps, module: nn.Module, examples: Sequence[Tensor], where: Places, *, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Largest errors of the engine and of eager float32 by output, relative to the largest number, over carried events.

    Raises NativeError for a module that cannot run in float64.
    """
    events = random_events(module, examples, where, num_events=NUM_COMPARED, seed=seed + 1)
    start = [examples[at] for at in where.carried]
    try:
        exact = run(module, events, where, dtype=torch.float64, start=start)
    except RuntimeError as e:
        raise NativeError(f"{type(module).__name__} cannot run in float64: {str(e).partition(chr(10))[0]}") from e
    eager = run(module, events, where, dtype=torch.float32, start=start)
    ports, own, found = engine.manifest.outputs, engine.copy(), []
    own.reset()
    for event in events:
        made = tuple(torch.empty(port.shape, dtype=DTYPES[port.dtype]) for port in ports)
        own.step(*event, out=made if len(made) > 1 else made[0])
        found.append(made)
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
            self._loops = ctypes.CDLL(str(_compiled(Path(folder))))
        self._loops.flatout_measure_read.restype = ctypes.c_int64

    def floor_s(self, num_bytes: int) -> float:
        """Of reading so many bytes, over and over, from the smallest cache that holds them."""
        size = -(-max(num_bytes, _LEAST_BYTES) // 512) * 512
        buffer = _Aligned(size)
        passes, best = 1, self._read_ns(buffer, size, 1)
        while best < _READ_NS:
            passes *= 2
            best = self._read_ns(buffer, size, passes)
        best = min(best, *(self._read_ns(buffer, size, passes) for _ in range(_NUM_SAMPLES)))
        return best * 1e-9 / passes * num_bytes / size

    def _read_ns(self, buffer: _Aligned, size: int, passes: int) -> int:
        total = ctypes.c_uint64()
        arguments = (
            ctypes.c_void_p(buffer.address),
            ctypes.c_uint64(size),
            ctypes.c_int64(passes),
            ctypes.byref(total),
        )
        return max(1, int(self._loops.flatout_measure_read(*arguments)))

    def latency(
        self, library: Library, packed: bytes, events: Events, manifest: NativeManifest, num_events: int
    ) -> Latency:
        """Of single events, each between two readings of the clock, whose own cost is taken off."""
        table, weights = Table.from_address(library.address), _Aligned(len(packed), packed)
        state, work = _Aligned(library.state_bytes), _Aligned(library.work_bytes)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(table.reset)(state.address)
        tensors = [torch.stack(list(column)).contiguous() for column in zip(*events, strict=True)]
        outputs = [_Aligned(port.num_bytes) for port in manifest.outputs]
        number = len(tensors)
        pointers, num_all = ctypes.c_void_p * max(1, number), _with_warm(num_events)
        times = (ctypes.c_int64 * num_all)()
        self._loops.flatout_measure_events(
            ctypes.c_void_p(table.step),
            ctypes.c_void_p(weights.address),
            ctypes.c_void_p(state.address),
            ctypes.c_void_p(work.address),
            pointers(*(tensor.data_ptr() for tensor in tensors)),
            (ctypes.c_uint64 * max(1, number))(*(port.num_bytes for port in manifest.inputs)),
            ctypes.c_int64(number),
            pointers(),
            (ctypes.c_void_p * max(1, len(outputs)))(*(output.address for output in outputs)),
            ctypes.c_int64(len(events)),
            times,
            ctypes.c_int64(num_all),
        )
        empty = (ctypes.c_int64 * 1000)()
        self._loops.flatout_measure_clock(empty, ctypes.c_int64(len(empty)))
        return _latency(list(times), list(empty), num_events)


class _Aligned:
    """Memory that begins at a multiple of 64 bytes and is a multiple of 64 long; none of it is left untouched."""

    def __init__(self, size: int, data: bytes = b"") -> None:
        self._whole = ctypes.create_string_buffer(size + 128)
        self.address = -(-ctypes.addressof(self._whole) // 64) * 64
        ctypes.memset(self.address, 0, size)
        ctypes.memmove(self.address, data, len(data))


def _compiled(folder: Path) -> Path:
    source, out = files("flatout.inference.native") / "c" / "measure.c", folder / "measure.so"
    flags = ["-std=gnu11", "-O3", "-fPIC", "-shared"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-march=native")  # for loads as wide as this machine has them; on ARM they have one width
    command = [find_compiler(), *flags, "-x", "c", "-", "-o", str(out)]
    ended = subprocess.run(command, input=source.read_text(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NativeError(f"the measuring loops did not compile: {shortened(ended.stderr)}")
    return out


def _latency(times_ns: Sequence[int], empty_ns: Sequence[int], num_events: int) -> Latency:
    """Of the last `num_events`, without what reading the clock takes."""
    clock_ns = median(empty_ns)
    kept = sorted(max(0.0, taken - clock_ns) * 1e-9 for taken in times_ns[-num_events:])

    def at(fraction: float) -> float:
        return kept[min(len(kept) - 1, int(fraction * len(kept)))]

    return Latency(p50_s=at(0.5), p99_s=at(0.99), p999_s=at(0.999), num_events=len(kept))


def _with_warm(num_events: int) -> int:
    return num_events + max(1, int(_WARM_FRACTION * num_events))


def _argument(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy() if find_spec("numpy") else tensor.contiguous()
