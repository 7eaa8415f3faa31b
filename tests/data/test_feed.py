"""A feed resumes bit for bit, whatever the workers; it is tried on a small model with random augmentation and accumulation."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatout.data.batches import Batches
from flatout.data.feed import Feed
from flatout.data.ragged import Ragged
from flatout.data.rows import PackedRows, Rows
from flatout.errors import UsageError

LENGTHS = [1 + (7 * i) % 11 for i in range(40)]
STEPS = 9
"""Two epochs of four steps and the first of a third."""


class _Augmented(Dataset[Any]):
    """Samples with noise of torch and of random."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.randn(LENGTHS[index], 3) + index, random.random()


def _feed(workers: int, **plan: Any) -> Feed[Any]:
    return Feed(_Augmented(), Batches(LENGTHS, 12, accumulate=2, seed=4, **plan), workers=workers)


class _Training:
    """A model with dropout, accumulation over two micro-batches, and a checkpoint after each step."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(1)
        self.feed = _feed(workers)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def micro_steps(self) -> Iterator[int]:
        """One after the other; the number of optimizer steps done."""
        num_steps = num = 0
        while True:
            for tokens, noise in self.feed:
                loss = (self.net(tokens.values).sum() - noise.sum()).square() * 1e-4
                loss.backward()
                num += 1
                if num % 2 == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    num_steps += 1
                yield num_steps

    def saved(self) -> dict[str, Any]:
        return {
            "net": {k: v.clone() for k, v in self.net.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "feed": self.feed.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.feed.load_state_dict(saved["feed"])
        torch.set_rng_state(saved["random"])


def _weights(training: _Training, num_steps: int) -> Tensor:
    for done in training.micro_steps():
        if done == num_steps:
            break
    return torch.cat([p.detach().flatten() for p in training.net.parameters()])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stopped_anywhere_and_resumed_the_weights_are_bit_equal(workers: int) -> None:
    expected = _weights(_Training(0), STEPS)
    for stop in random.Random(workers).sample(range(1, 2 * STEPS), 30 // 3 if workers == 0 else 3):
        training = _Training(workers)
        saved = training.saved()
        before = 0
        for number, done in enumerate(training.micro_steps(), start=1):
            if done > before:  # after the optimizer has stepped
                before, saved = done, training.saved()
            if number == stop:
                break
        del training
        again = _Training(workers)
        again.load(saved)
        assert torch.equal(_weights(again, STEPS - before) if before < STEPS else expected, expected)


def _drawn(feed: Feed[Any]) -> list[tuple[int, float]]:
    """First value and noise of every sample of an epoch, in an order of its own."""
    return sorted(
        (round(float(t[0, 0]), 4), float(n))
        for tokens, noise in feed
        for t, n in zip(tokens.unbind(), noise, strict=True)
    )


def test_workers_and_ranks_draw_the_same_samples_and_augmentations() -> None:
    alone = _drawn(_feed(0))
    assert _drawn(_feed(1)) == alone
    assert _drawn(_feed(2)) == alone
    assert sorted(_drawn(_feed(0, rank=0, num_ranks=2)) + _drawn(_feed(0, rank=1, num_ranks=2))) == alone


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 11))
def test_the_state_in_an_accumulation_is_the_one_before_it(taken: int) -> None:
    feed = _feed(0)
    for _, _ in zip(range(taken), feed, strict=False):
        pass
    epoch, rest = divmod(taken, 8)
    if epoch == 0:
        assert feed.state_dict() == {"seed": 4, "epoch": 0, "step": rest // 2}


def test_epochs_follow_each_other_and_differ() -> None:
    feed = _feed(0)
    first, second = _drawn(feed), _drawn(feed)
    assert len(first) == len(second) == 40 and first != second
    assert feed.epoch == 2


def test_rows_are_fed_too() -> None:
    feed: Feed[PackedRows] = Feed(_Tokens(), Rows(LENGTHS, 16, 2, seed=1))
    batches = list(feed)
    assert all(b.values.shape == (2, 16) for b in batches)
    again: Feed[PackedRows] = Feed(_Tokens(), Rows(LENGTHS, 16, 2, seed=1), workers=1)
    again.load_state_dict({"seed": 1, "epoch": 0, "step": 2})
    assert all(torch.equal(a.values, b.values) for a, b in zip(batches[2:], again, strict=True))


class _Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(1, 100, (LENGTHS[index],))


def test_the_scripts_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    for workers in (0, 1):
        torch.manual_seed(3)
        for tokens, _ in _feed(workers):
            assert isinstance(tokens, Ragged)
        assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("state", "why"),
    [({"seed": 4, "epoch": 0}, "no state of a feed"), ({"seed": 5, "epoch": 0, "step": 0}, "plan with the same seed")],
)
def test_a_state_of_something_else_is_refused(state: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        _feed(0).load_state_dict(state)


def test_data_in_memory_are_cut_out_at_once_and_are_the_same_with_workers() -> None:
    table, texts = torch.randn(40, 3), [torch.randn(n, 2) for n in LENGTHS]
    pairs = torch.utils.data.TensorDataset(table, torch.arange(40))
    plan = [list(Batches(LENGTHS, 8, seed=2).step(n).ranks[0][0]) for n in range(5)]

    def fed(dataset: Any, workers: int = 0) -> list[Any]:
        return list(Feed(dataset, Batches(LENGTHS, 8, seed=2), workers=workers))

    for workers in (0, 1):
        assert all(torch.equal(b, table[i]) for b, i in zip(fed(table, workers), plan, strict=True))
        for (rows, numbers), chosen in zip(fed(pairs, workers), plan, strict=True):
            assert torch.equal(rows, table[chosen]) and numbers.tolist() == chosen
        for batch, chosen in zip(fed(texts, workers), plan, strict=True):
            assert all(torch.equal(t, texts[i]) for t, i in zip(batch.unbind(), chosen, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_on_the_device_in_order(workers: int) -> None:
    plan = Batches(LENGTHS, 8, seed=2)
    feed: Feed[Any] = Feed(_Augmented(), plan, device="meta", workers=workers, ahead=3)
    found = [(tokens.values.device.type, tokens.num_tokens, noise.shape[0]) for tokens, noise in feed]
    assert found == [("meta", plan.step(n, 0).num_tokens, 8) for n in range(5)]
    first = next(iter(feed))
    assert first[0].num_tokens == plan.step(0, 1).num_tokens  # the next epoch, left after one batch
