"""Models called on groups of rows of like length: the same results, and less padding."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import flatout
from flatout.core.errors import UsageError

PAD = 0


class Reader(nn.Module):
    """A small encoder with attention that masks padding, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8, padding_idx=PAD)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.seen: list[tuple[int, ...]] = []
        self.double()

    def forward(self, tokens: Tensor, ages: Tensor | None = None) -> Tensor:
        self.seen.append(tuple(tokens.shape))
        x: Tensor = self.embed(tokens)
        if ages is not None:
            x = x + ages[:, None, None]
        # the slow path in both modes: the fast one answers zeros for padding
        x = self.layer(x, src_mask=None, src_key_padding_mask=tokens == PAD)
        result: Tensor = self.head(x)
        return result


class Summary(Reader):
    """What it says of each row as a whole, beside the words."""

    def forward(self, tokens: Tensor, ages: Tensor | None = None) -> Any:
        words = super().forward(tokens, ages)
        mask = (tokens != PAD).unsqueeze(-1)
        return OrderedDict(words=words * mask, rows=(words * mask).sum(1), name="summary")


def batch(*lengths: int, width: int = 12) -> Tensor:
    tokens = torch.full((len(lengths), width), PAD)
    generator = torch.Generator().manual_seed(sum(lengths))
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, 20, (length,), generator=generator)
    return tokens


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 5))
def test_results_and_gradients_are_those_of_one_call(lengths: list[int], groups: int, multiple: int) -> None:
    tokens, ages = batch(*lengths), torch.arange(len(lengths), dtype=torch.float64)
    one, other = Summary(), Summary()

    expected = one(tokens, ages)
    found = flatout.call_by_length(other, tokens, pad=PAD, groups=groups, multiple=multiple, ages=ages)

    assert list(found) == ["words", "rows", "name"] and found["name"] == "summary"
    for name in ("words", "rows"):
        torch.testing.assert_close(found[name], expected[name])
    for result in (expected, found):
        (result["rows"].square().sum() + result["words"].sin().sum()).backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert sum(rows * width for rows, width in other.seen) <= tokens.numel()


def test_each_group_is_as_wide_as_its_longest_row_rounded_up() -> None:
    model = Reader()
    flatout.call_by_length(model, batch(1, 9, 2, 8, 12, 3, 5, 4), pad=PAD, groups=4, multiple=2)
    assert model.seen == [(2, 2), (2, 4), (2, 8), (2, 12)]


def test_rows_of_one_length_are_divided_so_that_positions_can_be_told_from_classes() -> None:
    """Three classes, and rows of three words: what the head says has no positions."""
    model = nn.Sequential(nn.EmbeddingBag(20, 3, mode="sum", padding_idx=PAD))
    tokens = batch(3, 3, 3, 3)
    found = flatout.call_by_length(model, tokens, pad=PAD, groups=4, multiple=1)
    torch.testing.assert_close(found, model(tokens))


def test_full_batches_are_one_call_on_what_was_given() -> None:
    model, tokens = Reader(), batch(12, 12, 12, 12)
    flatout.call_by_length(model, tokens, pad=PAD)
    assert model.seen == [(4, 12)]


def test_masks_are_cut_on_all_sides_that_have_positions() -> None:
    shapes = []

    def attend(tokens: Tensor, square: Tensor, row: Tensor, table: Tensor) -> Tensor:
        shapes.append((tuple(square.shape), tuple(row.shape), tuple(table.shape)))
        return tokens.sum(1)

    tokens = batch(2, 12)
    flatout.call_by_length(
        attend,
        torch.cat([tokens, tokens]),
        torch.ones(4, 1, 12, 12),
        torch.ones(1, 12),
        torch.ones(12, 5),
        pad=PAD,
        groups=2,
        multiple=1,
    )
    assert shapes == [((2, 1, 2, 2), (1, 2), (12, 5)), ((2, 1, 12, 12), (1, 12), (12, 5))]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda t: t.float().mean(), "not one result a row"),
        (lambda t: t[:, None] * t[..., None], "not one result a row"),
    ],
)
def test_a_model_whose_results_have_no_rows_is_refused(result: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        flatout.call_by_length(
            lambda t: result(t)[:, None, :, :] if result(t).dim() else result(t), batch(1, 2, 9, 9), pad=PAD
        )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="groups is 0"):
        flatout.call_by_length(Reader(), batch(1, 2), pad=PAD, groups=0)
    with pytest.raises(UsageError, match="no tensor of integers"):
        flatout.call_by_length(Reader(), torch.ones(2, 3), pad=PAD)
