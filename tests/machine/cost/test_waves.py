from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import UsageError
from flatout.machine.cost.waves import Rates, product_s, resident_blocks, wave_efficiency

H200 = {"threads_per_sm": 2048, "registers_per_sm": 65536, "shared_bytes_per_sm": 233472}


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(256, 32, 0, 8), (256, 128, 0, 2), (384, 168, 0, 1), (128, 16, 200_000, 1), (32, 16, 0, 32), (1024, 255, 0, 1)],
)
def test_the_scarcest_resource_decides(threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(block_threads=threads, registers=registers, shared_bytes=shared, **H200) == blocks


@given(st.integers(1, 10_000), st.integers(1, 2000))
def test_efficiency_is_a_share_and_whole_rounds_lose_nothing(blocks: int, num_resident: int) -> None:
    assert 0.5 <= wave_efficiency(num_blocks=blocks, num_resident=num_resident) <= 1.0
    assert wave_efficiency(num_blocks=blocks * num_resident, num_resident=num_resident) == 1.0


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        wave_efficiency(num_blocks=0, num_resident=132)
    with pytest.raises(UsageError, match="block_threads"):
        resident_blocks(block_threads=0, registers=1, shared_bytes=0, **H200)


RATES = Rates(flop_per_s=3e14, bytes_per_s=1.5e12, num_units=108, fill_s=1.5e-6, misaligned_share=0.25, kernel_s=4e-6)
sizes = st.integers(1, 4096).map(lambda n: 8 * n)


@given(m=sizes, n=sizes, k=sizes)
def test_never_faster_than_the_roofline(m: int, n: int, k: int) -> None:
    floor_s = max(2.0 * m * n * k / RATES.flop_per_s, 2.0 * (m * k + k * n + m * n) / RATES.bytes_per_s)
    assert product_s(RATES, m, n, k) >= floor_s


def test_a_round_that_is_hardly_begun_costs_a_whole_one() -> None:
    fast_memory = RATES._replace(bytes_per_s=1e15)
    assert product_s(fast_memory, 64 * 109, 64, 4096) > 1.3 * product_s(fast_memory, 64 * 108, 64, 4096)
    assert product_s(RATES, 256 * 216, 128, 4096) == pytest.approx(2 * product_s(RATES, 256 * 108, 128, 4096), rel=0.03)


def test_rows_that_begin_anywhere_are_slow() -> None:
    aligned, not_aligned = product_s(RATES, 4096, 50304, 1024), product_s(RATES, 4096, 50257, 1024)
    assert not_aligned / aligned == pytest.approx(4, rel=0.05)


def test_a_batch_fills_the_device_as_one_large_product_does() -> None:
    assert product_s(RATES, 128, 128, 64, batch=108) < 4 * product_s(RATES, 128, 128, 64)


def test_arithmetic_of_twice_the_rate_does_not_fill_a_tile_sooner() -> None:
    fast_memory = RATES._replace(bytes_per_s=1e15, kernel_s=0.0)
    twice = fast_memory._replace(flop_per_s=2 * RATES.flop_per_s)
    shape = (256 * 108, 128, 2048)
    arithmetic_s = 2.0 * shape[0] * shape[1] * shape[2] / RATES.flop_per_s
    assert product_s(fast_memory, *shape) == pytest.approx(arithmetic_s + RATES.fill_s)
    assert product_s(twice, *shape) == pytest.approx(arithmetic_s / 2 + RATES.fill_s)


def test_wider_results_take_more_of_memory() -> None:
    slow_memory = RATES._replace(bytes_per_s=1e10, kernel_s=0.0)
    more_s = product_s(slow_memory, 1024, 1024, 64, itemsize=1, result_bytes=4) - product_s(
        slow_memory, 1024, 1024, 64, itemsize=1
    )
    assert more_s == pytest.approx(3 * 1024 * 1024 / 1e10)
