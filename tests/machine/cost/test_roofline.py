from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import HardwareError, UsageError
from flatout.core.records.hardware import Machine
from flatout.machine.cost import roofline
from flatout.machine.cost.accounting import speed_up
from flatout.machine.specs import catalog

MACHINE = Machine(
    device_kind="cpu",
    device_name="Test CPU",
    cpu_model="Test CPU",
    num_cores=2,
    num_threads=2,
    torch_version="2.13.0",
    measured_at="2026-11-21T00:00:00+00:00",
    effort="full",
    matmul_flop_per_s={"float32": 1e12},
    copy_bytes_per_s=1e10,
    cache_bytes=1000,
    cache_bytes_per_s=1e11,
    dispatch_s=1e-6,
    dispatch_grad_s=3e-6,
    seconds=10.0,
    unknown={"matmul_flop_per_s.int8": "it raised"},
)
H100 = catalog.load_spec("nvidia-h100-sxm")
amounts = st.integers(0, 10**15)


def test_the_floor_is_the_larger_limit() -> None:
    compute = roofline.operation_floor(MACHINE, flop=1e12, traffic_bytes=1e9, dtype="float32")
    bandwidth = roofline.operation_floor(MACHINE, flop=1e9, traffic_bytes=1e10, dtype="float32")
    assert (compute.floor_s, compute.regime) == (1.0, "compute")
    assert (bandwidth.floor_s, bandwidth.regime) == (1.0, "bandwidth")


def test_a_tiny_operator_is_overhead() -> None:
    floor = roofline.operation_floor(MACHINE, flop=1e3, traffic_bytes=10, dtype="float32")
    assert floor.regime == "overhead"
    assert floor.overhead_s == pytest.approx(1e-6)
    assert floor.floor_s < floor.overhead_s


def test_a_data_sheet_knows_no_overhead() -> None:
    floor = roofline.operation_floor(H100, flop=989.4e12, traffic_bytes=1, dtype="bfloat16")
    assert floor.floor_s == pytest.approx(1.0)
    assert floor.overhead_s is None
    assert floor.regime == "compute"


def test_the_faster_engine_counts() -> None:
    assert roofline.peak_flop_per_s(H100, "float64") == pytest.approx(66.9e12)


@given(amounts, amounts, st.integers(1, 4))
def test_the_floor_scales_with_the_work(flop: int, traffic_bytes: int, times: int) -> None:
    one = roofline.operation_floor(H100, flop=flop, traffic_bytes=traffic_bytes, dtype="bfloat16")
    many = roofline.operation_floor(H100, flop=times * flop, traffic_bytes=times * traffic_bytes, dtype="bfloat16")
    assert many.floor_s == pytest.approx(times * one.floor_s)


def test_the_regime_changes_at_the_ridge() -> None:
    ridge = roofline.peak_flop_per_s(H100, "bfloat16") / roofline.bandwidth_bytes_per_s(H100)
    below = roofline.operation_floor(H100, flop=0.99 * ridge * 1e9, traffic_bytes=1e9, dtype="bfloat16")
    above = roofline.operation_floor(H100, flop=1.01 * ridge * 1e9, traffic_bytes=1e9, dtype="bfloat16")
    assert (below.regime, above.regime) == ("bandwidth", "compute")


def test_traffic_that_fits_the_cache_is_charged_at_its_bandwidth() -> None:
    assert roofline.bandwidth_bytes_per_s(MACHINE, traffic_bytes=1000) == 1e11
    assert roofline.bandwidth_bytes_per_s(MACHINE, traffic_bytes=1001) == 1e10
    unmeasured = msgspec.structs.replace(MACHINE, cache_bytes_per_s=None)
    assert roofline.bandwidth_bytes_per_s(unmeasured, traffic_bytes=1000) == 1e10


def test_moving_bytes_needs_no_rate() -> None:
    assert roofline.operation_floor(MACHINE, flop=0, traffic_bytes=1e10, dtype="int64").floor_s == 1.0


def test_an_unknown_rate_is_an_error_with_the_reason() -> None:
    with pytest.raises(HardwareError, match=r"no rate for 'int8' .* \(it raised\); known: float32"):
        roofline.operation_floor(MACHINE, flop=1, traffic_bytes=1, dtype="int8")
    with pytest.raises(HardwareError, match="no memory bandwidth for 'generic-cpu'"):
        roofline.bandwidth_bytes_per_s(catalog.load_spec("generic-cpu"))


def test_negative_work_is_refused() -> None:
    with pytest.raises(UsageError, match="neither may be negative"):
        roofline.operation_floor(MACHINE, flop=-1, traffic_bytes=1, dtype="float32")


def test_saving_more_than_the_step_is_refused() -> None:
    assert speed_up(1.0, 0.75) == 4.0
    with pytest.raises(UsageError, match="saved_s"):
        speed_up(1.0, 1.0)
