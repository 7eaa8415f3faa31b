"""The machine under bench/native.py: what it is, what its core can do, and how long single events of an engine take in C."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from native_models import Array, Case
from native_peers import compile_shared, compiler, output_shape

Record = dict[str, Any]


class Machine:
    """What the core does, by bench/native_c/machine.c."""

    def __init__(self, folder: Path) -> None:
        compile_shared(Path(__file__).parent / "native_c" / "machine.c", folder / "machine.so")
        self.compiled = ctypes.CDLL(str(folder / "machine.so"))
        self.compiled.seconds_of_reading.restype = self.compiled.seconds_of_products.restype = ctypes.c_double
        self.compiled.seconds_of_reading.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self.compiled.seconds_of_products.argtypes = [ctypes.c_int64]
        self.compiled.times_of_events.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64, ctypes.c_void_p] * 2

    def bytes_per_s(self, num_bytes: int) -> float:
        """Of reading a buffer of that many bytes again and again; the best of nine, since this is a bound."""
        whole = max(512, num_bytes // 512 * 512)
        buffer = np.ones(whole + 64, np.uint8)  # written to: pages of zeros would all be one page
        at, again = -(-buffer.ctypes.data // 64) * 64, max(1, 100_000_000 // whole)
        return max(whole * again / self.compiled.seconds_of_reading(at, whole, again) for _ in range(9))

    def flop_per_s(self) -> float:
        again = 200_000
        return max(again * 12 * 32 / self.compiled.seconds_of_products(again) for _ in range(9))

    def latencies(self, engine: Any, case: Case, num: int) -> Record:
        """Of single events in a loop in C, through the library and the weights of the engine's folder; `machine`: of as long a
        loop of additions in registers after each, whose tail is what this core does to any work of that length."""
        from flatout.blocks.inference.native.folder import read_weights
        from flatout.blocks.inference.native.library import open_library

        with tempfile.TemporaryDirectory(prefix="engine-") as name:
            engine.save(Path(name))
            table = open_library(Path(name) / f"lib{engine.manifest.name}.so")
            weights = aligned(read_weights(Path(name) / "weights.bin"))
        state, work = aligned(bytes(table.state_bytes)), aligned(bytes(table.work_bytes))
        x, y = case.events(1, seed=1)[0][0].numpy(), np.zeros(output_shape(case), np.float32)
        ins, outs = (ctypes.c_void_p * 1)(x.ctypes.data), (ctypes.c_void_p * 1)(y.ctypes.data)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(table.reset)(state.ctypes.data)
        taken, alone, links = np.zeros(num + 1, np.int64), np.zeros(num, np.int64), 1000
        for count in (num // 20, num):  # warm, then measured
            step = table.step, weights.ctypes.data, state.ctypes.data, work.ctypes.data
            shown = ctypes.addressof(ins), ctypes.addressof(outs)
            self.compiled.times_of_events(*step, *shown, count, taken.ctypes.data, links, alone.ctypes.data)
            took, added = (float(np.median(one[:count])) for one in (taken, alone))
            links = max(1, round(links * took / added))
        return {**percentiles(taken[:num]), "clock_s": int(taken[num]) * 1e-9, "machine": percentiles(alone)}


def aligned(data: bytes) -> Array:
    """These bytes at a multiple of 64."""
    whole = np.zeros(len(data) + 64, np.uint8)
    at = -whole.ctypes.data % 64
    whole[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return whole[at : at + len(data)]


def percentiles(taken_ns: Any) -> Record:
    p50, p99, p999 = np.quantile(np.asarray(taken_ns), [0.5, 0.99, 0.999]) * 1e-9
    return {"p50_s": p50, "p99_s": p99, "p999_s": p999, "most_s": int(max(taken_ns)) * 1e-9, "events": len(taken_ns)}


def hardware() -> Record:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = (index / "type").read_text().strip()
        caches[f"L{(index / 'level').read_text().strip()} {kind.lower()}"] = (index / "size").read_text().strip()
    known = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "vectors": [flag for flag in known if flag in flags],
        "caches": caches,
        "load": os.getloadavg()[0],
    }


def write_results(out: Path | None, rows: list[Record], text: str) -> None:
    """Say the table; the rows as lines of JSON to `out`, and the table beside them, if anywhere."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out.with_suffix(".txt").write_text(text + "\n")


def versions() -> Record:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "flatout"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    said = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return {"versions": {**found, "compiler": said.splitlines()[0]}}
