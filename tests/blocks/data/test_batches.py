from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from flatout.blocks.data.batches import Batches
from flatout.core.errors import UsageError
from flatout.machine.cost.batching import transformer_cost

LENGTHS = st.lists(st.integers(1, 300), min_size=12, max_size=120)


def _lengths(num: int, *, seed: int = 0) -> list[int]:
    """Log-normal, as text is (ANCHORS: mean 198, at most 2048)."""
    draw = random.Random(seed)
    return [min(2048, max(1, round(draw.lognormvariate(4.88, 0.9)))) for _ in range(num)]


@pytest.mark.slow
@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(6, 20), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once_whatever_the_ranks(
    lengths: list[int], num_ranks: int, accumulate: int, size: int, epoch: int
) -> None:
    plan = Batches(lengths, size, num_ranks=num_ranks, accumulate=accumulate)
    alone = Batches(lengths, size)
    counts: Counter[int] = Counter()
    for number in range(plan.num_steps(epoch)):
        step = plan.step(number, epoch)
        assert all(micro for rank in step.ranks for micro in rank)
        assert [len(rank) for rank in step.ranks] == [accumulate] * num_ranks
        samples = sorted(i for rank in step.ranks for micro in rank for i in micro)
        assert samples == sorted(alone.step(number, epoch).ranks[0][0])  # the batch of the uniform shuffle
        assert (step.num_samples, step.num_tokens) == (len(samples), sum(lengths[i] for i in samples))
        counts.update(samples)
    assert set(counts.values()) == {1}
    assert len(lengths) - len(counts) < num_ranks * accumulate


@pytest.mark.slow
@given(LENGTHS, st.integers(0, 5))
def test_any_step_is_known_without_those_before(lengths: list[int], start: int) -> None:
    plan = Batches(lengths, 6, num_ranks=2, rank=1, seed=3)
    plan.set_epoch(1)
    whole = list(plan)
    start = min(start, plan.num_steps())
    again = Batches(lengths, 6, num_ranks=2, rank=1, seed=3)
    again.set_epoch(1, step=start)
    assert list(again) == whole[start:]
    assert len(again) == len(whole) - start


def test_epochs_and_seeds_shuffle_anew() -> None:
    plan, other = Batches(_lengths(400), 32), Batches(_lengths(400), 32, seed=1)
    assert plan.step(0, 0) != plan.step(0, 1)
    assert plan.step(0, 0) != other.step(0, 0)
    assert plan.step(0, 0) == Batches(_lengths(400), 32).step(0, 0)


@pytest.mark.slow
def test_ranks_idle_little_when_no_sample_is_too_large() -> None:
    found = Batches(_lengths(20000), 256, num_ranks=8, cost=transformer_cost(768)).report(num_steps=500)
    assert found.mean_over_largest > 3
    assert found.idle_fraction < 0.005
    assert found.padded_fraction > 0.5
    assert 0.8 < found.vif < 1.25


@pytest.fixture
def few_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouping is chosen by fewer batches than in earnest."""
    monkeypatch.setattr("flatout.blocks.data.batches._MOST_TRIED", 512)


@pytest.mark.slow
def test_shuffle_quality_is_traded_for_idle_time_as_far_as_allowed(few_tried: None) -> None:
    lengths = _lengths(20000)
    idle = []
    for most in (1.0, 2.2, 3.5):
        plan = Batches(lengths, 32, num_ranks=8, cost=transformer_cost(768), max_vif=most)
        found = plan.report(num_steps=1250)
        idle.append(found.idle_fraction)
        assert found.vif <= most * 1.15
    assert idle[0] > idle[1] > idle[2]
    assert idle[2] < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 61])
def test_regrouped_batches_hold_every_sample_once_and_are_as_large(seed: int, few_tried: None) -> None:
    lengths = _lengths(317, seed=seed)
    plan = Batches(lengths, 16, num_ranks=4, max_vif=8.0, seed=seed, cost=transformer_cost(64))
    steps = [plan.step(n) for n in range(plan.num_steps())]
    samples = [i for s in steps for rank in s.ranks for micro in rank for i in micro]
    assert sorted(samples) == list(range(317))
    assert [s.num_samples for s in steps] == [16] * 19 + [13]
    again = Batches(lengths, 16, num_ranks=4, max_vif=8.0, seed=seed, cost=transformer_cost(64))
    assert again.step(11) == steps[11]


@pytest.mark.slow
@given(LENGTHS, st.integers(300, 2000))
def test_batches_by_tokens_keep_the_budget(lengths: list[int], tokens: int) -> None:
    plan = Batches(lengths, tokens=tokens, num_ranks=2)
    steps = [plan.step(n) for n in range(plan.num_steps())]
    assert all(s.num_tokens <= tokens or s.num_samples == 2 for s in steps)
    assert sum(s.num_samples for s in steps) >= len(lengths) - 1
    # no sample of the next batch would have fitted
    order = [[i for rank in s.ranks for micro in rank for i in micro] for s in steps]
    assert all(a.num_tokens + max(lengths[i] for i in b) > tokens for a, b in zip(steps, order[1:], strict=False))


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_batch_sampler_of_a_loader(workers: int) -> None:
    plan = Batches([1 + i % 7 for i in range(64)], 16, rank=1, num_ranks=2)
    loader: DataLoader[Any] = DataLoader(_Numbers(), batch_sampler=plan, num_workers=workers)  # type: ignore[arg-type]
    assert [b.tolist() for b in loader] == [list(plan.step(n).ranks[1][0]) for n in range(4)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"size": 4, "num_ranks": 8}, "cannot be shared out"),
        ({"size": 4, "tokens": 100}, "give one of them"),
        ({}, "give one of them"),
        ({"size": 4, "rank": 2, "num_ranks": 2}, "count from 0"),
        ({"size": 4, "max_vif": 0.5}, "no batching"),
        ({"tokens": 100, "max_vif": 2.0}, "stay a uniform"),
        ({"size": 80, "num_ranks": 80}, "fewer than"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Batches([3] * 20, **arguments)


def test_empty_samples_and_steps_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="sample 1 has length 0"):
        Batches([1, 0, 2], 2)
    with pytest.raises(UsageError, match="steps 0 to 2"):
        Batches([1, 1, 2, 2], 2).set_epoch(0, step=3)
