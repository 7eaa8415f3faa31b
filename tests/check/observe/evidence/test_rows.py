"""Rows of a device's steps: the device's seconds from its kernels, the host's from what a step leaves it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.check.observe.evidence.rows import OperatorRow, bound_of, to_host, to_kernels, waited_s
from flatout.check.observe.operators.recorder import OperatorKey, TensorMeta
from flatout.core.records.device import DeviceKernel, DeviceStep, HostWait
from flatout.core.records.evidence import HostRead


def row(
    op: str, *, site: int = 0, op_s: float = 0.0, python_s: float = 0.0, size: int = 8, phase: str = "forward"
) -> OperatorRow:
    meta = TensorMeta((size,), torch.float32, True, "cuda")
    key = OperatorKey(op, site, "", phase, (meta,), (meta,), "")
    return OperatorRow(key, 1, op_s, python_s, python_s / 2)


def step(*kernels: tuple[str, int, float], busy_s: float = 1.0, waits: tuple[HostWait, ...] = ()) -> DeviceStep:
    rows = tuple(
        DeviceKernel(name=op, source=site, phase="forward", num_launches=1, seconds=seconds, op=op)
        for op, site, seconds in kernels
    )
    return DeviceStep(name="a device", span_s=busy_s, busy_s=busy_s, kernels=rows, waits=waits)


def test_an_operators_kernels_are_shared_out_by_its_events() -> None:
    """One line's product has kernels of 30 ms, of which a row with three quarters of the event time takes three quarters."""
    rows = [row("aten.mm", op_s=0.06, size=8), row("aten.mm", op_s=0.02, size=4), row("aten.add", op_s=0.01)]
    exact = to_kernels(rows, step(("aten.mm", 0, 0.030), ("aten.add", 0, 0.001)), 1, 0.031)
    assert [r.op_s for r in exact] == pytest.approx([0.0225, 0.0075, 0.001])


def test_a_view_whose_events_span_its_launch_takes_no_device_time() -> None:
    rows = [row("aten.mm", op_s=0.03), row("aten.view", op_s=0.01)]
    exact = to_kernels(rows, step(("aten.mm", 0, 0.03)), 1, 0.03)
    assert [r.op_s for r in exact] == pytest.approx([0.03, 0.0])


def test_the_same_operator_on_another_line_has_its_own_kernels() -> None:
    rows = [row("aten.mm", site=0, op_s=0.02), row("aten.mm", site=1, op_s=0.02)]
    exact = to_kernels(rows, step(("aten.mm", 0, 0.01), ("aten.mm", 1, 0.04)), 1, 0.05)
    assert [r.op_s for r in exact] == pytest.approx([0.01, 0.04])


def test_without_lines_from_the_profiler_the_events_share_the_busy_time() -> None:
    rows = [row("aten.mm", op_s=0.06), row("aten.add", op_s=0.02)]
    assert [r.op_s for r in to_kernels(rows, None, 1, 0.04)] == pytest.approx([0.03, 0.01])
    assert [r.op_s for r in to_kernels(rows, None, 1, 1.0)] == pytest.approx([0.06, 0.02])


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 2), st.floats(0, 1)), max_size=8),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 2), st.floats(1e-6, 1)), max_size=8),
    st.floats(1e-6, 2),
    st.integers(1, 3),
)
def test_no_more_than_the_busy_time_is_reported(
    recorded: list[tuple[str, int, float]], kernels: list[tuple[str, int, float]], busy_s: float, num_steps: int
) -> None:
    rows = [row(op, site=site, op_s=seconds) for op, site, seconds in recorded]
    exact = to_kernels(rows, step(*kernels), num_steps, busy_s)
    assert sum(r.op_s for r in exact) <= busy_s * num_steps * (1 + 1e-9)
    assert all(r.op_s >= 0 for r in exact)


def test_the_host_works_no_longer_than_the_step_leaves_it() -> None:
    rows = [row("aten.mm", python_s=0.06), row("aten.add", python_s=0.02)]
    assert [r.python_s for r in to_host(rows, 1, 0.04)] == pytest.approx([0.03, 0.01])
    assert [r.dispatch_s for r in to_host(rows, 1, 0.04)] == pytest.approx([0.015, 0.005])
    assert to_host(rows, 1, 0.2) == rows


def read(wait_s: float, *, on_device: bool = True) -> HostRead:
    return HostRead(source=0, call="item", calls=1, wait_s=wait_s, phase="other", on_device=on_device)


def test_waits_are_the_reads_of_a_device_or_the_profilers_where_it_saw_more() -> None:
    synchronised = step(waits=(HostWait(source=0, call="cudaDeviceSynchronize", num=1, seconds=0.03),))
    assert waited_s([read(0.02), read(0.01, on_device=False)], None) == pytest.approx(0.02)
    assert waited_s([read(0.02)], synchronised) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("device_s", "wait_s", "bound"),
    [(0.046, 0.0, "device"), (0.044, 0.0, "host"), (0.044, 0.030, "device"), (0.002, 0.001, "host")],
)
def test_a_device_with_more_to_do_than_the_host_bounds_the_step(device_s: float, wait_s: float, bound: str) -> None:
    """A loop that reads a value waits for a device that is not quite always busy: its host has still less to do."""
    assert bound_of(device_s, step_s=0.05, wait_s=wait_s) == bound
