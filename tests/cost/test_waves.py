from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.cost.waves import resident_blocks, wave_efficiency
from flatout.errors import UsageError

H200 = {"threads_per_sm": 2048, "registers_per_sm": 65536, "shared_bytes_per_sm": 233472}


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(256, 32, 0, 8), (256, 128, 0, 2), (384, 168, 0, 1), (128, 16, 200_000, 1), (32, 16, 0, 32), (1024, 255, 0, 1)],
)
def test_the_scarcest_resource_decides(threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(block_threads=threads, registers=registers, shared_bytes=shared, **H200) == blocks


@given(st.integers(1, 10_000), st.integers(1, 2000))
def test_efficiency_is_a_share_and_whole_rounds_lose_nothing(blocks: int, slots: int) -> None:
    assert 0.5 <= wave_efficiency(num_blocks=blocks, slots=slots) <= 1.0
    assert wave_efficiency(num_blocks=blocks * slots, slots=slots) == 1.0


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        wave_efficiency(num_blocks=0, slots=132)
    with pytest.raises(UsageError, match="block_threads"):
        resident_blocks(block_threads=0, registers=1, shared_bytes=0, **H200)
