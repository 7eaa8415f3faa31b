from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.cost.products import Rates, product_s

RATES = Rates(flop_per_s=3e14, bytes_per_s=1.5e12, num_units=108, fill_depth=64.0, misaligned_share=0.25, kernel_s=4e-6)
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
