"""A run with everything that the page can show."""

from __future__ import annotations

import msgspec
import pytest

from flatout.core.records.compilation import Compilation, CompileEvent
from flatout.core.records.device import Copy, DeviceKernel, DeviceStep, Gap, HostWait
from flatout.core.records.distributed import Collective, Distributed, RankSummary, Replication
from flatout.core.records.evidence import Evidence, Operator, TensorSpec
from flatout.core.records.finding import Diagnosis
from flatout.core.records.memory import Growth, Memory, MemoryPart, MemoryPoint, RetainedGraph
from flatout.core.records.span import Span, StepTimeline
from flatout.core.records.workload import Setting
from flatout.report.html import html_report

change = msgspec.structs.replace

CURVE = (
    (0.00, 310, "data"),
    (0.06, 322, "forward"),
    (0.12, 420, "forward"),
    (0.20, 610, "forward"),
    (0.30, 820, "forward"),
    (0.40, 1010, "forward"),
    (0.46, 1180, "backward"),
    (0.55, 900, "backward"),
    (0.65, 720, "backward"),
    (0.78, 520, "backward"),
    (0.88, 440, "optimizer"),
    (0.96, 312, "other"),
)
AT_PEAK = (
    ("activations", 610, 84, 0, "blocks.0.attention"),
    ("parameters", 120, 148, -1, "GPT"),
    ("optimizer state", 240, 296, 3, ""),
    ("gradients", 96, 80, -1, ""),
    ("temporaries", 90, 3, 4, "head"),
    ("batch", 14, 2, 2, ""),
    ("kept", 10, 40, 3, ""),
)


def timeline() -> StepTimeline:
    """A step on a device: the host runs ahead, waits for data first and for the device at the end."""
    phases = [
        ("data", 0.0, 9.1),
        ("forward", 9.1, 10.2),
        ("backward", 19.3, 14.5),
        ("optimizer", 33.8, 3.2),
        ("other", 37.0, 1.2),
    ]
    spans = [
        Span(track="phase", name=n, start_s=a / 1e3, duration_s=d / 1e3, is_wait=n == "data") for n, a, d in phases
    ]
    for i in range(60):
        start_s = 0.0092 + i * 0.00047
        name, source = (("aten.bmm", 0), ("aten._softmax", 0), ("aten.addmm", 4), ("aten.add", -1))[i % 4]
        spans.append(Span(track="host", name=name, start_s=start_s, duration_s=0.0004, source=source))
        kernel = f"void cutlass::Kernel2<{name}_128x128>"
        late_s = start_s + 0.0004 + i * 0.00002
        spans.append(Span(track="device", name=kernel, start_s=late_s, duration_s=0.00042, source=source))
    spans.append(
        Span(track="host", name="cudaStreamSynchronize", start_s=0.0372, duration_s=0.0009, source=3, is_wait=True)
    )
    spans.append(
        Span(track="copy", name="Memcpy HtoD (Pageable -> Device)", start_s=0.0085, duration_s=0.0006, source=2)
    )
    return StepTimeline(duration_s=0.0382, spans=tuple(spans), is_scaled=True, num_left_out=212)


def memory(device: str = "cuda:0") -> Memory:
    mib = 1 << 20
    return Memory(
        device=device,
        peak_bytes=1180 * mib,
        peak_phase="backward",
        at_peak=tuple(
            MemoryPart(
                kind=kind,
                bytes=size * mib,
                num_tensors=num,
                source=source,
                module=module,
                example="float32[8, 256, 256]",
            )  # type: ignore[arg-type]
            for kind, size, num, source, module in AT_PEAK
        ),
        curve=tuple(MemoryPoint(at=at, bytes=size * mib, phase=phase) for at, size, phase in CURVE),
        measured_peak_bytes=1204 * mib,
        reserved_bytes=1400 * mib,
        total_bytes=80 << 30,
        growth_bytes_per_step=2.0 * mib,
        growth=(
            Growth(
                source=3,
                holder=3,
                container="list 'losses' of <module>",
                bytes_per_step=2 * mib,
                tensors_per_step=1,
                has_graph=True,
            ),
        ),
        retained=(RetainedGraph(source=3, bytes=6 * mib, num_calls=212),),
        num_retries=2,
        num_cache_clears=1.0,
    )


def device_step() -> DeviceStep:
    return DeviceStep(
        name="NVIDIA H200",
        span_s=0.0379,
        busy_s=0.0311,
        kernels=(
            DeviceKernel(
                name="void cutlass::Kernel2<softmax_128x128>", source=0, phase="forward", num_launches=8, seconds=0.011
            ),
            DeviceKernel(name="ampere_sgemm_128x64_nn", source=4, phase="backward", num_launches=16, seconds=0.014),
        ),
        gaps=(Gap(source=3, num=2, seconds=0.0031, cause="host-wait"),),
        copies=(
            Copy(
                source=2,
                direction="host-to-device",
                memory="pageable",
                is_async=False,
                num=2,
                bytes=3 << 20,
                seconds=0.0006,
                overlapped_s=0.0,
                host_s=0.0006,
            ),
        ),
        waits=(HostWait(source=3, call="cudaStreamSynchronize", num=1, seconds=0.0009),),
        slowdown=1.08,
        num_sms=132,
        clock_fraction=0.97,
        throttle_reasons=("power cap",),
    )


def distributed() -> Distributed:
    phases = {"forward": 0.0102, "backward": 0.0145, "optimizer": 0.0032}
    return Distributed(
        backend="nccl",
        rank=0,
        world_size=4,
        ranks=tuple(
            RankSummary(rank=r, host="node-a", step_s=0.0382, work_s=0.03 + r / 500, phases=phases, num_steps=212)
            for r in range(3)
        ),
        collectives=(
            Collective(
                op="all_reduce",
                source=3,
                phase="backward",
                backend="nccl",
                group_size=4,
                num=5,
                bytes=1 << 24,
                seconds=0.004,
                exposed_s=0.0021,
                wait_s=0.001,
            ),
        ),
        replications=(
            Replication(
                source=3,
                bucket_bytes=(1 << 20, 1 << 22),
                find_unused_parameters=True,
                has_unused_parameters=False,
                static_graph=False,
                gradient_as_bucket_view=False,
                syncs_per_step=4.0,
            ),
        ),
        missing_ranks=(3,),
    )


@pytest.fixture
def full(evidence: Evidence) -> Evidence:
    """The small run with every optional record filled."""
    compilation = Compilation(
        compile_s=12.4,
        num_frames=3,
        num_graphs=5,
        events=(
            CompileEvent(kind="limit", source=4, reason="recompile_limit reached", count=1, in_steps=1),
            CompileEvent(kind="graph-break", source=0, reason="call to print", count=2, seconds=1.2),
            CompileEvent(
                kind="recompile", source=4, reason="size mismatch at index 1", count=7, seconds=8.1, in_steps=6
            ),
        ),
        compiled_at=(4,),
        before_limit_s=0.031,
    )
    setting = Setting(name="detect_anomaly", value="True", source=evidence.sources[3])
    matrix = TensorSpec(shape=(64, 64), dtype="float32")
    operator = Operator(
        op="aten.bmm",
        source=0,
        module="blocks.0.attention",
        phase="forward",
        inputs=(matrix, matrix),
        outputs=(matrix,),
        num_calls=8,
        op_s=0.003,
        python_s=0.001,
        flop=524288,
        bytes=49152,
    )
    return change(
        evidence,
        workload=change(
            evidence.workload, settings=(setting,), num_parameters=124_439_808, trained_parameters=124_439_808
        ),
        steps=change(
            evidence.steps, durations_s=tuple(0.038 + (i * 7 % 11) / 4000 for i in range(212)), device_s=0.031
        ),
        operators=(operator,),
        memory=(memory(), change(memory("cpu"), curve=(), growth=(), at_peak=())),
        compilation=compilation,
        device_step=device_step(),
        distributed=distributed(),
        timeline=timeline(),
    )


_DRAWN: list[bytes] = []


@pytest.fixture
def drawn(full: Evidence, diagnosis: Diagnosis) -> bytes:
    """The page of that run, drawn once for all tests of a process."""
    if not _DRAWN:
        _DRAWN.append(html_report(full, diagnosis))
    return _DRAWN[0]
