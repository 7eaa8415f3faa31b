"""Rows of a padded batch that are not padding, one behind the other: taken out, and put back.

B rows of a batch, T positions, N packed rows
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowPlaces(NamedTuple):
    """Where packed rows come from, and where they go."""

    index_N: Tensor
    """Of each packed row its place among all B * T; -1 for those that only fill up."""
    inverse_BT: Tensor
    """Of each place its packed row; -1 for padding."""
    is_trailing: bool
    """Whether padding lies behind all real tokens of its row."""


def packed_rows(tokens: Tensor, *, pad: int, multiple: int) -> RowPlaces:
    """Where the tokens [B, T] that are not `pad` go, N rounded up to a multiple. On a device the host waits for their number."""
    is_real = tokens != pad
    places = is_real.flatten().nonzero().squeeze(1)
    filling = -len(places) % multiple or (multiple if not len(places) else 0)
    index = torch.nn.functional.pad(places, (0, filling), value=-1)
    inverse = is_real.flatten().cumsum(0).sub_(1).view_as(tokens)
    is_trailing = not bool((is_real[:, 1:] & ~is_real[:, :-1]).any())
    return RowPlaces(index, inverse.masked_fill_(~is_real, -1), is_trailing)


@torch.library.custom_op("flatout::labelled_tokens", mutates_args=())
def labelled_tokens(tokens: Tensor, index: Tensor, inverse: Tensor, is_trailing: bool) -> Tensor:
    """The tokens, in a graph where it shall be known which rows of them are packed to what; see RowPlaces."""
    return tokens.clone()


@labelled_tokens.register_fake
def _(tokens: Tensor, index: Tensor, inverse: Tensor, is_trailing: bool) -> Tensor:
    return torch.empty_like(tokens)


@torch.library.custom_op("flatout::labelled_mask", mutates_args=())
def labelled_mask(mask: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """The mask [B, T], in a graph where it shall be known that it is 1 where tokens are real, and 0 elsewhere."""
    return mask.clone()


@labelled_mask.register_fake
def _(mask: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return torch.empty_like(mask)


def offsets_of(inverse: Tensor) -> Tensor:
    """Where the packed rows of each sample begin, and behind the last, where they end: (B + 1,) int32."""
    counts = (inverse >= 0).sum(dim=1)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def gather_real(dense: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """The packed rows [N, ...] of an array [B, T, ...]. Those that fill up are a copy of the first, and get no gradient."""
    result: Tensor = _GatherReal.apply(dense, index, inverse)  # type: ignore[no-untyped-call]
    return result


def gather_expanded(values: Tensor, num_own: int, index: Tensor, inverse: Tensor) -> Tensor:
    """The packed rows of what is broadcast to [B, T, ...]; the last `num_own` dimensions are a row's own."""
    own = values.shape[values.dim() - num_own :]
    return gather_real(values.expand(*inverse.shape, *own), index, inverse)


def spread_real(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """The array [B, T, ...] of packed rows [N, ...], with zeros for padding."""
    result: Tensor = _SpreadReal.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return result


class _GatherReal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _taken(dense, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        return spread_real(grad, index, inverse), None, None


class _SpreadReal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        places = inverse.clamp_min(0)
        return rows[places].masked_fill(_wide(inverse < 0, rows.dim() - 1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        packed = gather_real(grad, index, inverse)
        return packed.masked_fill(_wide(index < 0, packed.dim() - 1), 0), None, None


def _taken(dense: Tensor, index: Tensor) -> Tensor:
    places, width = index.clamp_min(0), dense.shape[1]
    return dense[places // width, places % width]


def _wide(mask: Tensor, num_more: int) -> Tensor:
    """The mask with so many more dimensions behind its own."""
    return mask.reshape(*mask.shape, *(1,) * num_more)
