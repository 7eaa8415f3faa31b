"""Measures the ceilings of this machine: the same numbers a PyTorch program can reach, in seconds, never guessed."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch

from flatout.core.errors import HardwareError, UsageError
from flatout.core.records.hardware import Identity, Machine
from flatout.core.runtime.cores import usable_cores
from flatout.machine.measure import loads
from flatout.machine.measure.loads import MATMUL_DTYPES, MIB, Load
from flatout.machine.measure.timer import HostClock, TimerClock, clock_for, host_clock_for, processor_share, time_call

Effort = Literal["full", "quick"]
PRODUCT = "matmul_flop_per_s."
SUSTAINED = "sustained_flop_per_s."

# An H200 multiplies at full clock for about 0.1 s, then its power limit takes 15 % (measured 2026-11-21: 795 TFLOP/s in
# bfloat16 for the first 50 products of n = 8192, 680 after 400). Bursts stay below, and rests let the limiter recover.
BURST_S = 0.05
REST_S = {"quick": 0.1, "full": 0.3}


def measure_machine(*, device: torch.device | str | None = None, budget_s: float = 25.0) -> Machine:
    """Measure `device` (default: the GPU if there is one, else the CPU) in about `budget_s` seconds.

    Uses up to a quarter of the free memory, touches no random state, and restores every flag. The machine should be
    idle: what else runs is measured too, and shows in `spread`.

    Raises HardwareError when the basic figures cannot be measured, UsageError for a device that is neither
    CPU nor CUDA.
    """
    return _measure(_device(device), budget_s=budget_s, effort="full")


def quick_probe(*, device: torch.device | str | None = None) -> Machine:
    """The same record in at most about two seconds: smaller sizes, fewer repeats, wider spread."""
    return _measure(_device(device), budget_s=1.5, effort="quick")


def identify(device: torch.device | str | None = None) -> Identity:
    """The identity of this machine; needs no measurement."""
    device = _device(device)
    processor = cpu_model()
    return Identity(
        device_kind="cuda" if device.type == "cuda" else "cpu",
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        cpu_model=processor,
        num_cores=usable_cores(),
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
    )


@dataclass(frozen=True)
class _Probe:
    """How to get one figure: the load (made for a time limit), the clock, and the figure from work and seconds."""

    figure: str
    make: Callable[[float], Load]
    clock: TimerClock
    read: Callable[[float, float], float]
    rest_s: float = 0.0
    longest_s: float = math.inf


@dataclass
class _Results:
    values: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def _rate(work: float, call_s: float) -> float:
    return work / call_s


def _cost(work: float, call_s: float) -> float:
    return call_s / work


def _measure(device: torch.device, *, budget_s: float, effort: Effort) -> Machine:
    if budget_s <= 0:
        raise UsageError(f"budget_s {budget_s} is not positive; 25 gives steady figures, 1.5 rough ones")
    results = _Results()
    seconds = HostClock().elapsed_s(lambda: _run(device, results, budget_s=budget_s, effort=effort), 1)
    for figure in ("copy_bytes_per_s", "dispatch_s", "dispatch_grad_s"):
        if figure not in results.values:
            raise HardwareError(
                f"'{figure}' cannot be measured on '{device}': {results.unknown[figure]}; is torch whole?"
            )
    known = {
        **msgspec.structs.asdict(identify(device)),
        **{figure: value for figure, value in results.values.items() if "." not in figure},
        "matmul_flop_per_s": _by_dtype(results.values, PRODUCT),
        "sustained_flop_per_s": _by_dtype(results.values, SUSTAINED),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "effort": effort,
        "seconds": seconds,
        "memory_bytes": _memory_bytes(device),
        "cache_bytes": _cache_bytes(device),
        "spread": results.spread,
        "conditions": results.conditions,
        "unknown": results.unknown,
    }
    return msgspec.convert(known, Machine)


def _by_dtype(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {figure.removeprefix(prefix): value for figure, value in values.items() if figure.startswith(prefix)}


def _run(device: torch.device, results: _Results, *, budget_s: float, effort: Effort) -> None:
    probes = _cpu_probes(effort) if device.type == "cpu" else _cuda_probes(device, effort)
    if device.type == "cpu":
        results.unknown[f"{PRODUCT}tf32"] = "TF32 is a format of GPUs"
        gpu_only = ("launch_s", "sync_s", "h2d_pageable_bytes_per_s", "h2d_pinned_bytes_per_s")
        results.unknown.update(dict.fromkeys(gpu_only, "no GPU is measured here"))
    share_s = budget_s / len(probes)
    with _plain_mode(device):
        for probe in probes:
            _run_one(probe, device, results, share_s=share_s)
        if device.type == "cpu":
            product = loads.matmul_load("float32", device=device, limit_s=share_s / 8, free_bytes=_free_bytes(device))
            num_calls = max(1, round(results.values[f"{PRODUCT}float32"] * share_s / 2 / product.work))
            results.values["processor_share"] = processor_share(
                product.call, num_threads=torch.get_num_threads(), num_calls=num_calls
            )
    _drop_impossible(results)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the loads used must not count as the program's


def _run_one(probe: _Probe, device: torch.device, results: _Results, *, share_s: float) -> None:
    precision: Literal["ieee", "tf32"] = "tf32" if probe.figure.endswith(".tf32") else "ieee"
    limit_s = min(share_s, probe.longest_s)
    try:
        with loads.float32_precision(device, precision):
            load = probe.make(limit_s)
            time.sleep(probe.rest_s)
            timing = time_call(load.call, min_time_s=limit_s / 2, max_time_s=limit_s, warmup=3, clock=probe.clock)
    except RuntimeError as e:  # what torch raises for a dtype or a size it cannot do here
        results.unknown[probe.figure] = str(e).strip().splitlines()[0]
        return
    results.values[probe.figure] = probe.read(load.work, timing.call_s.value)
    results.conditions[probe.figure] = f"{load.condition}; {timing.call_s.num_samples} samples"
    if timing.spread is not None and timing.call_s.num_samples >= 4:  # fewer have no quartiles
        results.spread[probe.figure] = timing.spread


def _drop_impossible(results: _Results) -> None:
    """Drop figures that cannot be: on a busy machine a short parallel copy waits for the scheduler, and a cache seems
    slower than memory.
    """
    cache, memory = (results.values.get(figure) for figure in ("cache_bytes_per_s", "copy_bytes_per_s"))
    if cache is not None and memory is not None and cache < memory:
        del results.values["cache_bytes_per_s"]
        results.unknown["cache_bytes_per_s"] = "it came out slower than memory, as on a busy machine"


def _cpu_probes(effort: Effort) -> list[_Probe]:
    device = torch.device("cpu")
    free_bytes = _free_bytes(device)
    level2_bytes = _sysfs_cache_bytes(level=2) or MIB
    # Twice the last-level cache for each buffer, so that the copy reaches memory.
    enough_bytes = max(64 * MIB if effort == "quick" else 256 * MIB, 2 * (_cache_bytes(device) or 0))
    copied_bytes = min(enough_bytes, free_bytes // 16)
    clock = clock_for(device)
    return [
        *_products(device, free_bytes),
        _Probe("copy_bytes_per_s", lambda _: loads.copy_load(device=device, num_bytes=copied_bytes), clock, _rate),
        _Probe(
            "cache_bytes_per_s",
            # Source and target together fill half of each thread's level-2 cache.
            lambda _: loads.copy_load(device=device, num_bytes=level2_bytes // 4 * torch.get_num_threads()),
            clock,
            _rate,
        ),
        _Probe("dispatch_s", lambda _: loads.tiny_operator(device=device), clock, _cost),
        _Probe("dispatch_grad_s", lambda _: loads.tiny_sequence(device=device), clock, _cost),
    ]


def _cuda_probes(device: torch.device, effort: Effort) -> list[_Probe]:
    free_bytes = _free_bytes(device)
    large_bytes = min((256 if effort == "quick" else 1024) * MIB, free_bytes // 16)
    moved_bytes = min(
        (32 if effort == "quick" else 256) * MIB, free_bytes // 16, _free_bytes(torch.device("cpu")) // 16
    )
    cached_bytes = (_cache_bytes(device) or 0) // 5  # source and target well inside the level-2 cache
    clock, host = clock_for(device), host_clock_for(device)
    memories: tuple[Literal["pageable", "pinned"], ...] = ("pageable", "pinned")

    def make_upload(memory: Literal["pageable", "pinned"], limit_s: float) -> Load:
        return loads.host_to_device(device=device, num_bytes=moved_bytes, memory=memory)

    return [
        *(replace(probe, rest_s=REST_S[effort], longest_s=BURST_S) for probe in _products(device, free_bytes)),
        _Probe("copy_bytes_per_s", lambda _: loads.copy_load(device=device, num_bytes=large_bytes), clock, _rate),
        _Probe("cache_bytes_per_s", lambda _: loads.captured_copy(device=device, num_bytes=cached_bytes), clock, _rate),
        _Probe("dispatch_s", lambda _: loads.tiny_operator(device=device), host, _cost),
        _Probe("dispatch_grad_s", lambda _: loads.tiny_sequence(device=device), host, _cost),
        _Probe("launch_s", lambda _: loads.tiny_operator(device=device), clock, _cost),
        _Probe("sync_s", lambda _: loads.read_back(device=device), host, _cost),
        *(_Probe(f"h2d_{memory}_bytes_per_s", partial(make_upload, memory), clock, _rate) for memory in memories),
        *(_products(device, free_bytes, prefix=SUSTAINED) if effort == "full" else ()),
    ]


def _products(device: torch.device, free_bytes: int, *, prefix: str = PRODUCT) -> list[_Probe]:
    def make(name: str, limit_s: float) -> Load:
        # An eighth of the limit for one call leaves room for warm-up and several samples.
        return loads.matmul_load(name, device=device, limit_s=limit_s / 8, free_bytes=free_bytes)

    names = [name for name in MATMUL_DTYPES if name != "tf32" or device.type == "cuda"]
    return [_Probe(f"{prefix}{name}", partial(make, name), clock_for(device), _rate) for name in names]


@contextmanager
def _plain_mode(device: torch.device) -> Iterator[None]:
    """No inference mode, no autocast, no gradients, the right current device; what was there afterwards."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.no_grad())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"cannot probe device '{device}'; 'cpu' and 'cuda' can be probed")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _sysconf_bytes("SC_PHYS_PAGES")


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _sysconf_bytes("SC_AVPHYS_PAGES") or 1024 * MIB  # unknown: any machine that runs torch has that much


def _sysconf_bytes(pages: str) -> int | None:
    if pages not in os.sysconf_names:
        return None
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _cache_bytes(device: torch.device) -> int | None:
    """Bytes of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return next((size for level in (4, 3, 2) if (size := _sysfs_cache_bytes(level=level))), None)


def _sysfs_cache_bytes(*, level: int) -> int | None:
    """Size of the first core's unified cache of this level, where Linux tells it (as '32768K')."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (folder / "level").read_text().strip() == str(level):
            text = (folder / "size").read_text().strip()
            return int(text.removesuffix("K")) * 1024 if text.endswith("K") else None
    return None
