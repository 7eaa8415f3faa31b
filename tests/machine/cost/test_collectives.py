from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.records.scale import Tier
from flatout.machine.cost.collectives import all_reduce_s, all_to_all_s, gather_s, send_s

NVLINK = Tier(name="nvlink", reach=8, bytes_per_s=4e11, latency_s=1e-6)
FABRIC = Tier(name="infiniband", reach=1024, bytes_per_s=5e10, latency_s=5e-6)
TIERS = (NVLINK, FABRIC)


def test_a_ring_sends_twice_the_bytes_less_a_share() -> None:
    wanted = 14 * (1e-6 + 1e9 / 8 / 4e11)
    assert all_reduce_s(1e9, 8, TIERS) == pytest.approx(wanted)
    assert gather_s(1e9, 8, TIERS) == pytest.approx(wanted / 2)
    assert all_reduce_s(1e9, 1, TIERS) == 0.0


def test_ranks_that_lie_a_node_apart_use_the_fabric() -> None:
    assert all_reduce_s(1e9, 4, TIERS, stride=8) == pytest.approx(6 * (5e-6 + 1e9 / 4 / 5e10))
    assert send_s(1e9, TIERS, stride=8) == pytest.approx(5e-6 + 1e9 / 5e10)
    assert send_s(1e9, TIERS, stride=4) == pytest.approx(1e-6 + 1e9 / 4e11)


def test_over_two_tiers_only_a_share_goes_through_the_slow_one() -> None:
    inside = 14 * (1e-6 + 1e9 / 8 / 4e11)
    between = 2 * 15 * (5e-6 + 1e9 / 8 / 16 / 5e10)
    assert all_reduce_s(1e9, 128, TIERS) == pytest.approx(inside + between)


@given(
    num_bytes=st.floats(1, 1e11),
    ranks=st.sampled_from([2, 4, 8, 16, 64, 1024]),
    stride=st.sampled_from([1, 2, 8]),
    factor=st.floats(1, 10),
)
def test_more_bytes_and_less_of_the_link_never_take_less(
    num_bytes: float, ranks: int, stride: int, factor: float
) -> None:
    taken_s = all_reduce_s(num_bytes, ranks, TIERS, stride=stride)
    assert all_reduce_s(num_bytes * factor, ranks, TIERS, stride=stride) >= taken_s
    assert all_reduce_s(num_bytes, ranks, TIERS, stride=stride, share=1 / factor) >= taken_s
    # no rank can have the sum before it has sent and received nearly all of it, over the fastest link
    assert taken_s >= 2 * num_bytes * (1 - 1 / ranks) / NVLINK.bytes_per_s * (1 - 1e-9)


def test_what_goes_to_all_others_takes_the_longer_of_near_and_far() -> None:
    assert all_to_all_s(8e8, 8, TIERS) == pytest.approx(1e-6 + 7e8 / 4e11)
    assert all_to_all_s(8e8, 16, TIERS) == pytest.approx(5e-6 + 4e8 / 5e10)
    assert all_to_all_s(8e8, 4, TIERS, stride=8) == pytest.approx(5e-6 + 6e8 / 5e10)
    assert all_to_all_s(8e8, 1, TIERS) == 0.0
