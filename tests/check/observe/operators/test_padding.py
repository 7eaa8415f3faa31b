"""Which positions of a batch are padding, told from all of its tensors together."""

from __future__ import annotations

import pytest
import torch
from tests.check.observe.test_observer import observe
from torch import Tensor, nn

from flatout.check.observe.operators.padding import padded_rows, signs_of

WIDTH, PAD = 16, 7
LENGTHS = (5, 9, 12, 3)
FULL = (WIDTH,) * len(LENGTHS)


def tokens(lengths: tuple[int, ...] = LENGTHS, *, left: bool = False, pad: int = PAD) -> Tensor:
    """Rows of different tokens above 10, padded to the width."""
    rows = torch.full((len(lengths), WIDTH), pad)
    for row, length in enumerate(lengths):
        values = torch.arange(length) + 10 + 20 * row
        rows[row, WIDTH - length :] = values if left else rows[row, WIDTH - length :]
        if not left:
            rows[row, :length] = values
    return rows


def mask_of(ids: Tensor, pad: int = PAD) -> Tensor:
    return (ids != pad).long()


def test_tokens_with_their_mask_are_padded_and_the_mask_is_no_candidate() -> None:
    ids = tokens()

    found = padded_rows({"input_ids": ids, "attention_mask": mask_of(ids)})

    assert {name: rows.lengths for name, rows in found.items()} == {"input_ids": LENGTHS}
    assert found["input_ids"].pad_value == PAD
    assert signs_of(None, [ids, mask_of(ids)], LENGTHS) == ("mask",)


@pytest.mark.parametrize("left", [False, True])
def test_a_mask_of_truncated_or_left_padded_rows_is_no_padding(left: bool) -> None:
    """Most rows of the mask end in one, which is not what pads it."""
    ids = tokens((16, 16, 16, 6), left=left)

    found = padded_rows({"input_ids": ids, "attention_mask": mask_of(ids), "labels": ids.masked_fill(ids == PAD, -100)})

    assert "attention_mask" not in found
    assert all(max(rows.lengths) == WIDTH for rows in found.values())


def test_constant_tensors_are_no_padding() -> None:
    ones = torch.ones(4, WIDTH, dtype=torch.long)
    assert not padded_rows({"attention_mask": ones, "token_type_ids": 0 * ones, "langs": 5 * ones})


def test_zeros_beside_padded_tokens_do_not_speak_against_them() -> None:
    ids = tokens()
    found = padded_rows(
        {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "positions": torch.arange(WIDTH).expand(4, -1)}
    )
    assert found["input_ids"].lengths == LENGTHS


def test_a_mask_of_ones_says_that_trailing_constants_are_tokens() -> None:
    ids = tokens()
    assert padded_rows({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["input_ids"].lengths == FULL


def test_a_position_that_any_tensor_of_the_batch_fills_is_no_padding() -> None:
    ids, targets = tokens(), tokens((16, 16, 16, 15))
    found = padded_rows({"ids": ids, "targets": targets, "shorter": tokens()[:, :10]})
    assert found["ids"].lengths == found["targets"].lengths == (16, 16, 16, 15)


@pytest.mark.parametrize("pad", [0, PAD])
def test_rows_padded_on_the_left_have_nothing_to_crop_on_the_right(pad: int) -> None:
    ids = tokens(left=True, pad=pad)
    ids[:, -2:] = pad  # all end in the same tokens: an end mark that also pads
    assert padded_rows({"ids": ids})["ids"].lengths == FULL


def test_a_mask_with_ones_at_the_padding_agrees_with_the_tokens() -> None:
    ids = tokens()
    assert padded_rows({"ids": ids, "ignored": ids == PAD})["ids"].lengths == LENGTHS
    assert signs_of(None, [ids == PAD], LENGTHS) == ("mask",)


def test_float_rows_of_zeros_are_padding() -> None:
    values = torch.ones(4, WIDTH, 3)
    for row, length in enumerate(LENGTHS):
        values[row, length:] = 0
    assert padded_rows({"x": values})["x"].lengths == LENGTHS


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.embed(input_ids) * attention_mask[..., None]


def test_batches_padded_to_their_longest_row_are_full_in_it() -> None:
    def loop() -> None:
        net = Masked()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            ids = tokens((16, 16, 16, 6))
            net(input_ids=ids, attention_mask=mask_of(ids)).mean().backward()
            optimizer.step()

    assert all(p.longest_fraction == 1 and p.name == "input_ids" for p in observe(loop).paddings)
