from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatout.blocks.data.rows import Rows, RowsOf, filled, pack
from flatout.core.errors import UsageError
from flatout.machine.cost.batching import transformer_cost

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(SIZES)
def test_packing_loses_nothing_and_keeps_the_length(sizes: list[int]) -> None:
    rows = filled([(n, i) for i, n in enumerate(sizes)], 50)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    used = [sum(sizes[i] for i in row) for row in rows]
    assert max(used) <= 50
    # nothing of a later row would have fitted into an earlier one
    assert all(used[a] + min(sizes[i] for i in rows[b]) > 50 for b in range(len(rows)) for a in range(b))


def test_lengths_that_hardly_differ_are_packed_too() -> None:
    draw = random.Random(0)
    plan = Rows([round(draw.gauss(256, 8)) for _ in range(20000)], 2048, 4, num_ranks=2)
    assert plan.report(num_steps=100).waste_fraction < 0.02


def _lengths(num: int) -> list[int]:
    draw = random.Random(0)
    return [min(2048, max(1, round(draw.lognormvariate(4.88, 0.9)))) for _ in range(num)]


def test_hardly_a_token_is_wasted_and_ranks_hardly_wait() -> None:
    plan = Rows(_lengths(50000), 2048, 16, num_ranks=8, cost=transformer_cost(768))
    found = plan.report(num_steps=30)
    assert found.waste_fraction < 0.02
    assert found.idle_fraction < 0.02


@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2))
def test_ranks_share_the_rows_evenly_and_none_twice(num_ranks: int, accumulate: int, epoch: int) -> None:
    plan = Rows(_lengths(500), 2048, 2, num_ranks=num_ranks, accumulate=accumulate)
    seen: list[int] = []
    for number in range(plan.num_steps(epoch)):
        ranks = plan.step(number, epoch)
        assert [len(rows) for rows in ranks] == [2 * accumulate] * num_ranks
        seen += [i for rows in ranks for row in rows for i in row]
    assert len(seen) == len(set(seen)) > 300


class _Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1 + index % 9,), index)


def test_a_loader_gives_rows_of_one_shape_from_any_step_on() -> None:
    lengths = [1 + i % 9 for i in range(40)]

    def loaded(start: int) -> list[Any]:
        plan = Rows(lengths, 16, 2, seed=2)
        plan.set_epoch(1, step=start)
        loader: DataLoader[Any] = DataLoader(
            RowsOf(_Texts()),
            batch_sampler=plan,  # type: ignore[arg-type]
            collate_fn=partial(pack, length=16, value=-1),
        )
        return list(loader)

    whole, rest = loaded(0), loaded(3)
    assert all(batch.values.shape == (2, 16) for batch in whole)
    assert all(torch.equal(a.values, b.values) for a, b in zip(whole[3:], rest, strict=True))
    for batch in whole:
        assert torch.equal(batch.mask, batch.values >= 0)
        for row, samples, places in zip(*batch, strict=True):
            for number in range(int(samples.max()) + 1):
                sample = row[samples == number]
                assert len(sample) == 1 + int(sample[0]) % 9 and (sample == sample[0]).all()
                assert places[samples == number].tolist() == list(range(len(sample)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="sample 1 has 30 tokens"):
        Rows([5, 30], 16, 1)
    with pytest.raises(UsageError, match="empty one"):
        Rows([5, 0], 16, 1)
    with pytest.raises(UsageError, match="count from 0"):
        Rows([5], 16, 1, rank=1)
    with pytest.raises(UsageError, match="room for 3"):
        pack([[torch.ones(2), torch.ones(2)]], 3)
    with pytest.raises(UsageError, match="a step takes 8"):
        Rows([5, 5], 16, 8).report()
