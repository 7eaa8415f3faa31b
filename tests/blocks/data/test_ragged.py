from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from flatout.blocks.data.prefetch import Prefetch
from flatout.blocks.data.ragged import Ragged, collate_ragged, ragged
from flatout.core.errors import UsageError

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def _samples(lengths: list[int]) -> list[Tensor]:
    return [torch.arange(n * 2, dtype=torch.float32).view(n, 2) + 100 * i for i, n in enumerate(lengths)]


@given(LENGTHS)
def test_samples_come_out_as_they_went_in(lengths: list[int]) -> None:
    samples = _samples(lengths)
    batch = ragged(samples)
    assert (batch.num_samples, batch.num_tokens, batch.longest) == (len(lengths), sum(lengths), max(lengths))
    assert all(torch.equal(a, b) for a, b in zip(batch.unbind(), samples, strict=True))
    assert batch.lengths.tolist() == lengths


@given(LENGTHS)
def test_padded_is_what_torch_pads(lengths: list[int]) -> None:
    samples = _samples(lengths)
    rows, mask = ragged(samples).padded(-1.0)
    assert torch.equal(rows, pad_sequence(samples, batch_first=True, padding_value=-1.0))
    assert mask.sum(1).tolist() == lengths


def test_a_wider_padding_is_allowed_and_a_narrower_is_not() -> None:
    batch = ragged(_samples([2, 3]))
    rows, mask = batch.padded(length=8)
    assert rows.shape == (2, 8, 2) and mask.shape == (2, 8)
    with pytest.raises(UsageError, match="longest sample's 3"):
        batch.padded(length=2)


def test_tokens_know_their_sample_and_place() -> None:
    batch = ragged(_samples([2, 0, 3]))
    assert batch.samples.tolist() == [0, 0, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]


def test_gradients_flow_through_padding() -> None:
    batch = ragged(_samples([2, 3]))
    values = batch.values.clone().requires_grad_()
    rows, _ = batch._replace(values=values).padded()
    rows.square().sum().backward()
    assert values.grad is not None and torch.equal(values.grad, 2 * values.detach())


def test_nested_shares_the_memory() -> None:
    batch = ragged(_samples([2, 3]))
    nested = batch.nested()
    assert nested.is_nested and nested.values().data_ptr() == batch.values.data_ptr()
    assert [t.shape[0] for t in nested.unbind()] == [2, 3]


def test_fields_become_ragged_stacked_or_tensors() -> None:
    items = [(torch.ones(n), torch.ones(4), n, torch.tensor(n)) for n in (1, 3)]
    tokens, features, label, scalar = collate_ragged(items, stacked=(1,))
    assert isinstance(tokens, Ragged) and tokens.offsets.tolist() == [0, 1, 4]
    assert features.shape == (2, 4)
    assert label.tolist() == scalar.tolist() == [1, 3]
    by_name = collate_ragged([{"x": torch.ones(2), "name": "a"}, {"x": torch.ones(1), "name": "b"}])
    assert isinstance(by_name["x"], Ragged) and by_name["name"] == ["a", "b"]


def test_it_goes_through_a_loader_and_a_prefetch() -> None:
    items = [(t, i) for i, t in enumerate(_samples([1, 2, 3, 4]))]
    loader: DataLoader[tuple[Ragged, Tensor]] = DataLoader(
        items,  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=partial(collate_ragged, stacked=()),
    )
    batches = list(Prefetch(loader))
    assert [b[0].longest for b in batches] == [2, 4]
    assert isinstance(batches[0][0], Ragged)


def test_nothing_and_single_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="no samples"):
        ragged([])
    with pytest.raises(UsageError, match="single number"):
        ragged([torch.tensor(1.0)])
