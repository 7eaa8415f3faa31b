"""Traces built by hand in the format that torch.profiler writes (Kineto's Chrome trace), with sums that a test knows.

trace = Kineto()
trace.step(1, 0, 1000)                                  # microseconds
launch = trace.launch(at=100, op="aten::mm")
trace.kernel(launch, at=150, dur=300)
trace.write(folder / "trace.json")
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Final

BASE_NS: Final = 1_711_964_646_000_000_000
START_US: Final = 4_458_676_000_000.0
"""Time stamps of real traces are that large: what is lost in rounding must not matter."""
H200: Final = {
    "id": 0,
    "name": "NVIDIA H200",
    "numSms": 132,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
}
MATMUL: Final = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas"
)
POINTWISE: Final = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
ALL_REDUCE: Final = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MAIN: Final = 3905
AUTOGRAD: Final = 3907


class Kineto:
    """Events in the order they are added; times are microseconds from the trace's start."""

    def __init__(self, *, rank: int | None = None, world_size: int = 1, has_device: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
        self.extra["deviceProperties"] = [H200] if has_device else []
        if rank is not None:
            self.extra["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self._correlation = 0

    def host(self, name: str, at: float, dur: float, *, cat: str = "cpu_op", tid: int = MAIN, **args: Any) -> None:
        """An operator, an annotation or a Python function."""
        self._add(name, cat, at, dur, tid=tid, **args)

    def step(self, number: int, at: float, dur: float) -> None:
        self.host(f"ProfilerStep#{number}", at, dur, cat="user_annotation")

    def function(self, name: str, at: float, dur: float) -> None:
        self.host(name, at, dur, cat="python_function")

    def call(self, name: str, at: float, dur: float, *, tid: int = MAIN) -> int:
        """A runtime call; its correlation."""
        self._correlation += 1
        self._add(name, "cuda_runtime", at, dur, tid=tid, cbid=211, correlation=self._correlation)
        return self._correlation

    def launch(self, at: float, *, op: str = "aten::mm", tid: int = MAIN, **args: Any) -> int:
        """An operator that launches one kernel in its middle; the correlation of the launch."""
        self.host(op, at - 2, 10, tid=tid, **args)
        return self.call("cudaLaunchKernel", at, 5, tid=tid)

    def kernel(
        self,
        correlation: int,
        at: float,
        dur: float,
        *,
        name: str = MATMUL,
        stream: int = 7,
        blocks: int = 264,
        **args: Any,
    ) -> None:
        self._add(
            name,
            "kernel",
            at,
            dur,
            tid=stream,
            correlation=correlation,
            device=0,
            stream=stream,
            grid=[blocks, 1, 1],
            block=[256, 1, 1],
            **{"registers per thread": 128, "shared memory": 0, "blocks per SM": blocks / 132, "queued": 0},
            **args,
        )

    def copy(
        self, correlation: int, at: float, dur: float, *, kind: str = "HtoD (Pageable -> Device)", size: int = 4096
    ) -> None:
        self._add(
            f"Memcpy {kind}", "gpu_memcpy", at, dur, tid=7, correlation=correlation, device=0, stream=7, bytes=size
        )

    def text(self) -> str:
        return json.dumps({**self.extra, "traceEvents": self.events}, indent=1)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    def _add(self, name: str, cat: str, at: float, dur: float, *, tid: int, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": START_US + at, "dur": dur, "args": args}
        )


def training(*, steps: int = 3, rank: int | None = None, world_size: int = 1, late_us: float = 0.0) -> Kineto:
    """Steps of 1000 us. Busy for 600 us of each: forward 200, a copy of 100, backward 200, optimizer 100.

    The device idles 100 us before the forward (late launch), 100 before the backward (the host waits in `.item()`), 200 before
    the optimizer (late launch) and none between copy and forward. With a rank, an all-reduce of 150 + `late_us` us runs from 50
    us before the end of the backward.
    """
    trace = Kineto(rank=rank, world_size=world_size)
    for i in range(steps):
        t = 1000.0 * i
        trace.step(i, t, 999)
        trace.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t + 1, 30, cat="user_annotation")
        trace.function("train.py(20): main", t, 999)
        trace.host("aten::to", t + 35, 20)
        trace.copy(trace.call("cudaMemcpyAsync", t + 40, 8), t + 100, 100)
        trace.call("cudaStreamSynchronize", t + 49, 1)
        trace.function("train.py(7): forward", t + 60, 60)
        forward = trace.launch(
            t + 70, **{"Sequence number": 10 + i, "Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
        )
        trace.kernel(forward, t + 200, 200)
        trace.host("aten::item", t + 320, 150)
        trace.host("aten::_local_scalar_dense", t + 321, 148)
        trace.call("cudaStreamSynchronize", t + 325, 140)
        trace.host(
            "autograd::engine::evaluate_function: MmBackward0", t + 480, 30, tid=AUTOGRAD, **{"Sequence number": 10 + i}
        )
        trace.kernel(trace.launch(t + 490, tid=AUTOGRAD), t + 500, 200)
        trace.host("Optimizer.step#SGD.step", t + 880, 40, cat="user_annotation")
        trace.kernel(trace.launch(t + 890, op="aten::_foreach_add_"), t + 900, 100, name=POINTWISE)
        if rank is not None:
            reduce = trace.launch(t + 500, op="c10d::allreduce_", tid=AUTOGRAD)
            trace.kernel(
                reduce, t + 650, 150 + late_us, name=ALL_REDUCE, stream=20, blocks=24,
                **{"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Group size": world_size},
            )  # fmt: skip
    return trace
