"""A feed resumes bit for bit, whatever the workers; it is tried on a small model with random augmentation and accumulation."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from flatout.blocks.data.batches import Batches
from flatout.blocks.data.epochs import growing_sizes
from flatout.blocks.data.feed import BackendSelection, Feed
from flatout.blocks.data.ragged import Ragged
from flatout.blocks.data.rows import PackedRows, Rows
from flatout.core.errors import UsageError

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


@pytest.mark.slow
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


class _Slow(Dataset[Any]):
    """Items that are waited for, as those of a disk or a network."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.full((1 + index % 3,), float(index))


@pytest.mark.slow
@pytest.mark.parametrize("draws", [True, False])
def test_who_makes_batches_is_measured_and_changes_none(draws: bool) -> None:
    plan = {"size": 4, "accumulate": 2, "seed": 1}
    expected = [b.values for b in Feed(_Slow(0.0), Batches([1] * 400, **plan))]
    slow: Feed[Ragged] = Feed(_Slow(0.004), Batches([1] * 400, **plan), workers="measured", draws=draws)
    found = [batch.values for batch in slow]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    kinds = [t.backend.kind for t in slow.trials]
    assert kinds == (["here", "processes"] if draws else ["here", "threads", "processes"])
    assert slow.trials[0].wait_s > 0.9 * slow.trials[0].batch_s
    best = min(slow.trials, key=lambda t: t.batch_s)
    assert slow.backend == str(best.backend if best.batch_s < 0.97 * slow.trials[0].batch_s else slow.trials[0].backend)
    again = [batch.values for batch in slow]
    assert len(again) == len(expected)
    assert len(slow.trials) == len(kinds)


def test_items_that_cost_nothing_are_made_here_and_a_stop_in_a_trial_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    class Ticking(_Slow):
        def __getitem__(self, index: int) -> Tensor:
            nonlocal now_s
            now_s += 1e-4
            return super().__getitem__(index)

    monkeypatch.setattr("flatout.blocks.data.feed.perf_counter", lambda: now_s)

    def feed() -> Feed[Ragged]:
        return Feed(Ticking(0.0), Batches([1] * 400, 4, seed=1), workers="measured", draws=False)

    def batches_of(feed: Feed[Ragged], num: int) -> Iterator[Tensor]:
        nonlocal now_s
        for _, batch in zip(range(num), feed, strict=False):
            now_s += 0.02
            yield batch.values

    whole = list(batches_of(feed(), 100))
    stopped = feed()
    found = list(batches_of(stopped, 7))
    again = feed()
    again.load_state_dict(stopped.state_dict())
    found += batches_of(again, 100)
    assert len(found) == len(whole) == 100
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    assert (again.backend, len(again.trials)) == ("this process", 1)
    assert again.trials[0].wait_s == pytest.approx(4e-4)
    assert again.trials[0].batch_s == pytest.approx(0.0204)


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.0, 1.0)), min_size=3, max_size=3),
    st.booleans(),
    st.integers(1, 64),
)
def test_no_way_is_chosen_that_was_slower_than_this_process(
    measured: list[tuple[float, float]], has_threads: bool, num_cores: int
) -> None:
    selection = BackendSelection(None, has_threads=has_threads, num_cores=num_cores)
    for batch_s, share in measured:
        if not selection.is_settled:
            assert selection.backend.num <= num_cores
            selection.record(selection.backend, batch_s, batch_s * share)
    assert selection.is_settled
    selected = next(t for t in selection.trials if t.backend == selection.backend)
    assert selected.batch_s <= selection.trials[0].batch_s


class _Pictures(Dataset[Any]):
    """Asked for by number and size."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        number, size = key
        return torch.rand(size, size) + number


def _pictures(workers: int = 0, **plan: Any) -> Feed[Tensor]:
    sizes = growing_sizes(8, 32, epochs=2, multiple=8)
    return Feed(_Pictures(), Batches([1] * 24, 4, sizes=sizes, **plan), workers=workers, collate=torch.stack)


def test_pictures_are_made_at_the_size_of_their_step_and_resumed_there() -> None:
    feed = _pictures()
    batches = [batch for _ in range(3) for batch in feed]
    sizes = [b.size(-1) for b in batches]
    assert sizes == sorted(sizes)
    assert sorted(set(sizes)) == [8, 16, 24, 32]
    assert sizes[12:] == [32] * 6
    with_workers = _pictures(workers=1)
    assert all(torch.equal(a, b) for a, b in zip([b for _ in range(2) for b in with_workers], batches, strict=False))
    resumed = _pictures()
    resumed.load_state_dict({"seed": 0, "epoch": 1, "step": 4})
    assert all(torch.equal(a, b) for a, b in zip(resumed, batches[10:12], strict=True))


def test_texts_are_cut_to_the_length_of_their_step_and_count_as_that_long() -> None:
    texts = [torch.arange(n) for n in LENGTHS]
    batches = Batches(LENGTHS, 10, accumulate=2, sizes=growing_sizes(2, 11, epochs=1))
    feed: Feed[Ragged] = Feed(texts, batches)
    for epoch in range(2):
        for number, (one, two) in enumerate(zip(*[iter(feed)] * 2, strict=True)):
            size = batches.size_at(number, epoch)
            assert size == (2, 4, 6, 8)[number] if epoch == 0 else 11
            step = batches.step(number, epoch)
            assert one.num_tokens + two.num_tokens == step.num_tokens
            assert step.num_tokens == sum(min(size, LENGTHS[i]) for m in step.ranks[0] for i in m)
            assert max(one.longest, two.longest) <= size
    with pytest.raises(UsageError, match="all have one size"):
        next(iter(Feed(torch.zeros(40, 3), batches)))


@given(st.integers(1, 300), st.integers(0, 300), st.floats(0.1, 20), st.floats(0, 9), st.integers(1, 64))
def test_sizes_grow_in_multiples_from_low_to_high(
    low: int, more: int, epochs: float, start: float, multiple: int
) -> None:
    size = growing_sizes(low, low + more, epochs=epochs, start=start, multiple=multiple)
    found = [size((start + epochs) * part / 50) for part in range(60)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (low, low + more)
    assert all(s in (low, low + more) or s % multiple == 0 for s in found)


def test_sizes_that_do_not_grow_are_refused() -> None:
    with pytest.raises(UsageError, match="from 32 to 8 within 2 epochs"):
        growing_sizes(32, 8, epochs=2)
