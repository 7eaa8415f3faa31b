from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.check.traces.activity import Activity, device_spans, device_window
from flatout.check.traces.events import CallPlace, DeviceFacts, DeviceWork, HostCall

FACTS = DeviceFacts("NVIDIA H200", 132, 2048, 65536, 233472)
KINDS = st.sampled_from(["kernel", "copy", "set", "collective"])


@st.composite
def works(draw: st.DrawFn) -> list[DeviceWork]:
    found = []
    for i in range(draw(st.integers(0, 15))):
        start, size = draw(st.integers(0, 400)), draw(st.integers(1, 120))
        kind = draw(KINDS)
        name = "Memcpy HtoD (Pinned -> Device)" if kind == "copy" else f"k{draw(st.integers(0, 2))}"
        found.append(
            DeviceWork(start, start + size, kind, name, 0, draw(st.integers(7, 9)), i + 1, collective="all_reduce")
        )
    return found


@st.composite
def calls(draw: st.DrawFn) -> list[HostCall]:
    found = []
    for i in range(15):
        start = draw(st.integers(0, 400))
        name = draw(st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"]))
        found.append(HostCall(start, start + draw(st.integers(0, 80)), name, i + 1, 1))
    return found


def activity(work: list[DeviceWork], host: list[HostCall], start: int = 0, end: int = 600) -> Activity:
    return Activity(work, host, place_of=lambda c: CallPlace(c.correlation % 3, "forward"), start_ns=start, end_ns=end)


@pytest.mark.slow
@given(works(), calls(), st.integers(0, 300), st.integers(0, 600))
def test_busy_and_idle_add_up_to_the_span_and_every_part_to_its_whole(
    work: list[DeviceWork], host: list[HostCall], start: int, size: int
) -> None:
    recorded = activity(work, host, start, start + size)
    step = recorded.device_step(FACTS)
    span_s = size * 1e-9
    assert step.busy_s <= step.span_s + 1e-15
    assert step.span_s == pytest.approx(span_s)
    assert step.busy_s + sum(g.seconds for g in step.gaps) == pytest.approx(span_s)
    assert sum(k.seconds for k in step.kernels) + sum(c.seconds for c in step.copies) >= step.busy_s - 1e-15
    for copy in step.copies:
        assert 0 <= copy.overlapped_s <= copy.seconds + 1e-15
    exposed_s = sum(c.exposed_s for c in recorded.collectives())
    assert exposed_s <= step.busy_s + 1e-15
    for collective in recorded.collectives():
        assert 0 <= collective.exposed_s <= collective.seconds + 1e-15


@pytest.mark.slow
@given(works(), calls())
def test_a_timeline_leaves_out_the_shortest_and_counts_them(work: list[DeviceWork], host: list[HostCall]) -> None:
    recorded = activity(work, host)
    spans, left_out = device_spans(recorded, origin_ns=0, most=5)
    assert len(spans) + left_out == len(recorded.linked)
    assert len(spans) <= 5
    assert [s.start_s for s in spans] == sorted(s.start_s for s in spans)


def kernel(start: int, end: int, correlation: int, **more: object) -> DeviceWork:
    return DeviceWork(start, end, "kernel", "gemm", 0, 7, correlation)._replace(**more)


def launch(start: int, correlation: int, name: str = "cudaLaunchKernel", end: int = 0) -> HostCall:
    return HostCall(start, end or start + 1000, name, correlation, 1)


def test_a_gap_belongs_to_the_line_that_launched_too_late() -> None:
    recorded = activity([kernel(0, 10_000, 1), kernel(50_000, 60_000, 2)], [launch(0, 1), launch(40_000, 2)], 0, 60_000)
    [gap] = recorded.device_step(FACTS).gaps
    assert (gap.cause, gap.source, gap.num) == ("late-launch", 2, 1)
    assert gap.seconds == pytest.approx(40e-6)


def test_a_gap_after_work_that_was_queued_in_time_is_nobodys_fault() -> None:
    recorded = activity([kernel(0, 10_000, 1), kernel(50_000, 60_000, 2)], [launch(0, 1), launch(5_000, 2)], 0, 60_000)
    assert [g.cause for g in recorded.device_step(FACTS).gaps] == ["unknown"]


def test_a_gap_that_follows_a_wait_belongs_to_the_line_that_waited() -> None:
    wait = launch(2_000, 4, "cudaStreamSynchronize", 12_000)
    recorded = activity(
        [kernel(0, 10_000, 1), kernel(50_000, 60_000, 2)], [launch(0, 1), wait, launch(40_000, 2)], 0, 60_000
    )
    [gap] = recorded.device_step(FACTS).gaps
    assert (gap.cause, gap.source) == ("host-wait", 1)


def test_a_wait_on_another_thread_explains_nothing() -> None:
    wait = launch(2_000, 4, "cudaStreamSynchronize", 12_000)._replace(thread=2)
    recorded = activity(
        [kernel(0, 10_000, 1), kernel(50_000, 60_000, 2)], [launch(0, 1), wait, launch(40_000, 2)], 0, 60_000
    )
    assert [g.cause for g in recorded.device_step(FACTS).gaps] == ["late-launch"]


def test_a_copy_that_is_waited_for_at_once_blocks_the_host_and_one_that_is_not_does_not() -> None:
    blocking = [launch(0, 1, "cudaMemcpyAsync", 5_000), launch(6_000, 2, "cudaStreamSynchronize", 20_000)]
    free = [launch(100_000, 3, "cudaMemcpyAsync", 101_000)]
    work = [
        DeviceWork(8_000, 18_000, "copy", "Memcpy HtoD (Pageable -> Device)", correlation=1, bytes=64),
        DeviceWork(105_000, 115_000, "copy", "Memcpy HtoD (Pinned -> Device)", correlation=3, bytes=32),
        kernel(110_000, 150_000, 4),
    ]
    first, second = activity(work, blocking + free, 0, 150_000).device_step(FACTS).copies
    assert {first.memory, second.memory} == {"pageable", "pinned"}
    by_memory = {c.memory: c for c in (first, second)}
    assert not by_memory["pageable"].is_async
    assert by_memory["pageable"].host_s == pytest.approx(19e-6)
    assert by_memory["pinned"].is_async
    assert by_memory["pinned"].overlapped_s == pytest.approx(5e-6)
    assert (by_memory["pageable"].bytes, by_memory["pinned"].bytes) == (64, 32)


def test_communication_beside_kernels_is_not_exposed() -> None:
    work = [
        kernel(0, 100, 1),
        DeviceWork(50, 180, "collective", "nccl", correlation=2, stream=20, collective="all_reduce", bytes=8),
    ]
    [found] = activity(work, [launch(0, 1), launch(0, 2)], 0, 180).collectives()
    assert (found.op, found.num, found.bytes) == ("all_reduce", 1, 8)
    assert found.seconds == pytest.approx(130e-9)
    assert found.exposed_s == pytest.approx(80e-9)


def test_resident_blocks_are_counted_from_registers_and_threads() -> None:
    work = [kernel(0, 100, 1, num_blocks=300, block_threads=256, registers=128)]
    [row] = activity(work, [launch(0, 1)], 0, 100).device_step(FACTS).kernels
    assert (row.num_blocks, row.blocks_per_sm) == (300, 2)


def test_a_step_begins_on_the_device_when_earlier_work_is_done() -> None:
    assert device_window([kernel(0, 70, 1)], [kernel(70, 90, 2)], 50) == (70, 90)
    assert device_window([], [kernel(70, 90, 2)], 50) == (50, 90)
    assert device_window([kernel(0, 70, 1)], [], 50) == (50, 50)
