from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import UsageError
from flatout.machine.cost.batching import (
    SampleCost,
    fitted_cost,
    idle_fraction,
    longest_first,
    transformer_cost,
    variance_inflation,
)

COSTS = st.lists(st.floats(0.1, 100.0), min_size=6, max_size=40)


@given(COSTS, st.integers(1, 6))
def test_every_sample_goes_to_one_rank_and_every_rank_gets_some(costs: list[float], num_ranks: int) -> None:
    shares = longest_first(costs, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(shares)


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=7), st.integers(2, 3))
def test_the_longest_rank_is_within_four_thirds_of_the_best(costs: list[float], num_ranks: int) -> None:
    if len(costs) < num_ranks:
        return
    best = min(
        max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(costs))
    )
    found = max(sum(costs[i] for i in share) for share in longest_first(costs, num_ranks))
    assert found <= 4 / 3 * best * (1 + 1e-9)


@given(COSTS, st.integers(1, 3))
def test_a_rank_gets_as_many_as_it_must_have(costs: list[float], num_ranks: int) -> None:
    shares = longest_first([1e6, *costs], num_ranks, fewest=2)
    assert all(len(share) >= 2 for share in shares)
    assert sorted(i for share in shares for i in share) == list(range(len(costs) + 1))


@given(st.floats(0.1, 10.0), st.floats(0.0, 0.1))
def test_a_fitted_cost_is_the_one_that_made_the_times(token: float, pair: float) -> None:
    cost = SampleCost(token, pair)
    lengths = [16, 100, 400, 1500]
    found = fitted_cost(lengths, [cost.of(n) for n in lengths])
    assert found.token == pytest.approx(token, rel=1e-6)
    assert found.pair == pytest.approx(pair, rel=1e-6, abs=1e-9)


def test_a_fitted_cost_is_never_negative() -> None:
    assert fitted_cost([1, 2, 4], [1.0, 1.5, 2.0]).pair == 0.0
    assert fitted_cost([1, 2, 4], [0.1, 3.0, 20.0]).token == 0.0
    with pytest.raises(UsageError, match="two at least"):
        fitted_cost([8, 8], [1.0, 1.1])


def test_attention_is_half_of_a_transformer_at_six_times_its_width() -> None:
    assert transformer_cost(64).of(6 * 64) == 2 * 6 * 64


def test_ranks_that_wait_are_idle() -> None:
    assert idle_fraction([[1.0, 1.0], [2.0, 2.0]]) == 0.0
    assert idle_fraction([[4.0, 0.0]]) == 0.5


def test_batches_sorted_by_length_are_noisier_than_a_shuffle_by_their_size() -> None:
    lengths = list(range(1, 1025))
    in_order = [lengths[at : at + 16] for at in range(0, 1024, 16)]
    shuffled = [lengths[at::64] for at in range(64)]
    assert variance_inflation(in_order) == pytest.approx(16, rel=0.05)
    assert variance_inflation(shuffled) < 0.2  # each spans all lengths
    assert variance_inflation([[5, 5], [5, 5]]) == 1.0
