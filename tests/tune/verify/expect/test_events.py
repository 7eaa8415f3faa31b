"""What is made of a device's events, on events written by hand: where they were launched, and which count."""

from __future__ import annotations

from types import SimpleNamespace

from flatout.tune.verify.expect import kernels, waits
from flatout.tune.verify.expect.kernels import KernelLaunch
from flatout.tune.verify.expect.memory import Allocation, region_peak
from flatout.tune.verify.expect.operators import operator_kind
from flatout.tune.verify.expect.tape import DeviceEvent, EventSpot, HostEvent, TapeSegment, with_spots
from flatout.tune.verify.expect.waits import Wait

WINDOW = (100, 200)
SPOTS = {
    1: EventSpot(site=7, op="aten::mul"),
    2: EventSpot(site=8, is_backward=True, op="aten::mm"),
    3: EventSpot(site=9, is_compiling=True, op="aten::mm"),
    4: EventSpot(site=5, op="aten::_local_scalar_dense"),
}


def call(name: str, start_ns: int, correlation: int, linked: int = 0) -> DeviceEvent:
    return DeviceEvent("call", name, start_ns, correlation, linked)


def kernel(name: str, start_ns: int, correlation: int, linked: int = 0) -> DeviceEvent:
    return DeviceEvent("kernel", name, start_ns, correlation, linked)


def test_kernels_have_the_line_and_phase_of_the_event_that_launched_them() -> None:
    events = [
        call("cudaLaunchKernel", 110, 50, 1), kernel("mul", 300, 50, 1),
        call("cudaLaunchKernel", 120, 51, 2), kernel("gemm", 310, 51, 2),
    ]  # fmt: skip

    found = kernels.device_kernels(events, SPOTS, WINDOW)

    assert found == [KernelLaunch("mul", 7, False, "kernel"), KernelLaunch("gemm", 8, True, "kernel")]


def test_a_kernel_runs_when_it_can_and_belongs_where_it_was_launched() -> None:
    before = [call("cudaLaunchKernel", 90, 50, 1), kernel("late", 150, 50, 1)]
    after = [call("cudaLaunchKernel", 210, 51, 1), kernel("not ours", 220, 51, 1)]

    assert kernels.device_kernels(before + after, SPOTS, WINDOW) == []


def test_what_a_compiler_tries_on_the_device_does_not_count() -> None:
    events = [call("cuLaunchKernelEx", 110, 50, 3), kernel("autotuned", 120, 50, 3)]

    assert kernels.device_kernels(events, SPOTS, WINDOW) == []


def test_a_replayed_graph_counts_the_kernels_that_it_runs() -> None:
    events = [call("cudaGraphLaunch", 110, 50, 1), *(kernel(f"k{i}", 120 + i, 50) for i in range(3))]

    found = kernels.device_kernels(events, SPOTS, WINDOW)

    assert [(launch.name, launch.site) for launch in found] == [("k0", 7), ("k1", 7), ("k2", 7)]


def event(name: str, *children: HostEvent, sequence: int = -1) -> HostEvent:
    made = HostEvent(
        SimpleNamespace(
            name=name, start_time_ns=0, end_time_ns=1, correlation_id=0, tag=SimpleNamespace(name="TorchOp"),
            extra_fields=SimpleNamespace(sequence_number=sequence),
        )
    )  # fmt: skip
    made.children += children
    return made


def test_what_autograds_own_thread_runs_is_the_backwards_and_has_the_line_of_its_forward() -> None:
    forward = event("flatout.at#7", event("aten::sin", sequence=3))
    on_other_threads = event("autograd::engine::evaluate_function: SinBackward0", event("aten::cos"), sequence=3)
    segment = TapeSegment([event("flatout.region", event("aten::sin", forward, sequence=3)), on_other_threads])

    found = kernels.launches_of(segment, with_spots(segment, {}))

    assert found == [KernelLaunch("aten::sin", 7, False, "operator"), KernelLaunch("aten::cos", 7, True, "operator")]


def test_a_compiled_region_has_the_line_of_its_frame() -> None:
    kernel_event = event("aten::addmm")
    segment = TapeSegment([event("Torch-Compiled Region: 2/1", event("## Call CompiledFxGraph abc ##", kernel_event))])

    places = {e.name: spot for e, spot in with_spots(segment, {"2": 11})}

    assert (places["aten::addmm"].site, places["aten::addmm"].compiled) == (11, "2/1")


def test_a_launch_from_a_thread_without_a_line_counts() -> None:
    events = [call("cudaLaunchKernel", 110, 50), kernel("from another thread", 120, 50)]

    assert kernels.device_kernels(events, SPOTS, WINDOW) == [KernelLaunch("from another thread", -1, False, "kernel")]


def test_synchronising_calls_in_the_region_are_waits() -> None:
    events = [
        call("cudaStreamSynchronize", 90, 49, 4),
        call("cudaStreamSynchronize", 110, 50, 4),
        call("cudaDeviceSynchronize", 120, 51),
        call("cudaStreamIsCapturing", 130, 52),
        call("cudaStreamSynchronize", 140, 53, 3),
    ]

    found = waits.device_waits(events, SPOTS, WINDOW)

    assert found == [Wait("aten::_local_scalar_dense (cudaStreamSynchronize)", 5), Wait("cudaDeviceSynchronize", -1)]


def test_a_copy_to_pageable_memory_is_one_wait_with_or_without_a_synchronisation() -> None:
    copy = DeviceEvent("copy", "Memcpy DtoH (Device -> Pageable)", 115, 50, 1)
    pinned = DeviceEvent("copy", "Memcpy DtoH (Device -> Pinned)", 115, 50, 1)
    launch = call("cudaMemcpyAsync", 110, 50, 1)

    assert waits.device_waits([launch, copy], SPOTS, WINDOW) == [Wait("copy to pageable memory", 7)]
    assert len(waits.device_waits([launch, copy, call("cudaStreamSynchronize", 116, 51, 1)], SPOTS, WINDOW)) == 1
    assert waits.device_waits([launch, pinned], SPOTS, WINDOW) == []


def test_the_peak_is_that_of_the_device_where_there_is_one() -> None:
    entries = [
        Allocation(1, "cpu", 1, 10_000, EventSpot()),
        Allocation(2, "cuda:0", 1, 600, EventSpot(site=3, op="aten::mm")),
        Allocation(3, "cuda:0", 2, 400, EventSpot(site=4, op="aten::mul")),
        Allocation(4, "cuda:0", 1, -600, EventSpot()),
        Allocation(5, "cuda:0", 3, 500, EventSpot(site=4, op="aten::mul")),
        Allocation(6, "cuda:0", 9, -9_000, EventSpot()),
        Allocation(7, "cuda:0", 8, 5_000, EventSpot(is_compiling=True)),
        Allocation(8, "cuda:1", 1, 300, EventSpot()),
    ]

    peak = region_peak(entries)

    assert (peak.device, peak.bytes) == ("cuda:0", 1000)
    assert [(h.bytes, h.op, h.site) for h in peak.live] == [(600, "aten::mm", 3), (400, "aten::mul", 4)]


def test_operators_are_classified_by_what_torch_has_registered() -> None:
    kinds = {
        "aten::t_": "none", "aten::resize_": "none", "aten::_local_scalar_dense": "none", "aten::reshape": "none",
        "aten::_foreach_add_": "kernel", "aten::copy_": "kernel", "aten::zeros": "kernel", "aten::matmul": "composite",
        "SumBackward0": "none", "aten::no_such_operator": "none",
    }  # fmt: skip

    assert {name: operator_kind(name) for name in kinds} == kinds
