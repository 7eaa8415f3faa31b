"""Which step ranks go on from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.blocks.elastic.memory import NodeCopies, StoredCopy, buddies, restore_plans


def _tables(
    nodes: list[int], held: dict[int, list[tuple[int, int]]], *, num: int, is_sharded: bool = True
) -> list[NodeCopies]:
    """`held`: by node, (step, rank) of the copies there."""
    return [
        NodeCopies(
            node, tuple(StoredCopy(step, rank, num, is_sharded, f"{step}-{rank}") for step, rank in held.get(node, []))
        )
        for node in nodes
    ]


def test_the_newest_step_that_all_have_is_first_and_older_ones_follow() -> None:
    held = {0: [(5, 0), (4, 0), (4, 1), (3, 1)]}
    found = list(restore_plans(_tables([0, 0], held, num=2)))
    assert [step for step, _ in found] == [4]
    held = {0: [(5, 0), (5, 1), (4, 0), (4, 1)]}
    assert [step for step, _ in restore_plans(_tables([0, 0], held, num=2))] == [5, 4]


def test_a_copy_on_another_node_is_sent() -> None:
    held = {0: [(5, 0), (5, 1)], 1: []}
    ((step, (one, two)),) = restore_plans(_tables([0, 1], held, num=2))
    assert step == 5
    assert one.files == {0: "5-0"} and one.sends == ((1, "5-1"),)
    assert two.files == {} and two.sender == 0


def test_copies_of_more_ranks_are_read_where_each_sees_all_or_one_is_enough() -> None:
    everything = {0: [(5, rank) for rank in range(4)]}
    ((_, (one, _)),) = restore_plans(_tables([0, 0], everything, num=4))
    assert sorted(one.files) == [0, 1, 2, 3]
    some = {0: [(5, 0), (5, 1), (5, 3)]}
    assert list(restore_plans(_tables([0, 0], some, num=4))) == []
    ((_, (one, _)),) = restore_plans(_tables([0, 0], some, num=4, is_sharded=False))
    assert one.files == {0: "5-0"}


def test_nothing_is_no_plan() -> None:
    assert list(restore_plans(_tables([0, 1], {}, num=2))) == []


@pytest.mark.slow
@given(st.data())
def test_a_plan_gives_each_rank_its_copy_of_that_step_from_where_it_is(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 5))
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num))
    pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, num - 1)), unique=True, max_size=20)
    held = {node: data.draw(pairs) for node in set(nodes)}
    steps = [
        step
        for step in range(4, -1, -1)
        if all(any((step, rank) in copies for copies in held.values()) for rank in range(num))
    ]
    found = list(restore_plans(_tables(nodes, held, num=num)))
    assert [step for step, _ in found] == steps
    for step, readings in found:
        for rank, reading in enumerate(readings):
            if reading.files:
                assert reading.files == {rank: f"{step}-{rank}"} and (step, rank) in held[nodes[rank]]
            else:
                assert reading.sender is not None
                assert (rank, f"{step}-{rank}") in readings[reading.sender].sends
                assert (step, rank) in held[nodes[reading.sender]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9).map(sorted))
def test_a_buddy_is_on_another_node(nodes: list[int]) -> None:
    for rank, buddy in enumerate(buddies(nodes, is_within=False)):
        assert (buddy is None) == (len(set(nodes)) == 1)
        assert buddy is None or nodes[buddy] != nodes[rank]
    within = buddies(nodes, is_within=True)
    assert sorted(b for b in within if b is not None) == (list(range(len(nodes))) if len(nodes) > 1 else [])
