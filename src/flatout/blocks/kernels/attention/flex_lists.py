"""Our block lists as FlexAttention's BlockMask: both sides, no wider than the longest row, and masks as bits where they are no
formula.
"""

# B batch, H heads, R rows of blocks, C columns of blocks, W blocks of the longest row, N blocks that there are

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.blocks import BlockLists, dense_tiles
from flatout.blocks.kernels.attention.mask import Mask, MaskMod, Sizes

_WORD: Final = 32


class Side(NamedTuple):
    """Numbers of blocks of each row, (B, H, R), and their columns, (B, H, R, W); int32. What lies beyond a row's number is 0."""

    num: Tensor
    which: Tensor


def sides(lists: BlockLists) -> tuple[Side, Side, Side, Side]:
    """Partial and full blocks by rows of queries, then partial and full ones by columns of keys."""
    by_row = _pair(lists.row, lists.col, lists.is_full, (lists.batch, lists.heads, lists.num_rows))
    group, row = lists.row // lists.num_rows, lists.row % lists.num_rows
    by_col, order = (group * lists.num_cols + lists.col).sort(stable=True)
    by_col_shape = (lists.batch, lists.heads, lists.num_cols)
    return by_row + _pair(by_col, row[order], lists.is_full[order], by_col_shape)


def _pair(row: Tensor, col: Tensor, is_full: Tensor, shape: tuple[int, int, int]) -> tuple[Side, Side]:
    """Partial and full blocks of each row: (N,) rows, numbered through samples and heads and sorted, and (N,) columns.

    W is that of the longest row of the two, since FlexAttention's kernels read both with the strides of one; rounded up to a
    power of two, so that masks of many lengths have few shapes, and at least 2: torch.compile takes 0 and 1 for constants.
    """
    num_rows = shape[0] * shape[1] * shape[2]
    kinds = [(row[kind], col[kind]) for kind in (~is_full, is_full)]
    nums = [rows.bincount(minlength=num_rows) for rows, _ in kinds]
    longest = max((int(num.max()) for num in nums if num.numel()), default=0)
    width = max(2, 1 << max(0, longest - 1).bit_length())
    partial, full = (_side(*kind, num, shape, width) for kind, num in zip(kinds, nums, strict=True))
    return partial, full


def _side(row: Tensor, col: Tensor, num: Tensor, shape: tuple[int, int, int], width: int) -> Side:
    first = num.cumsum(0) - num
    place = torch.arange(col.numel(), device=col.device) - first[row]
    # tensors of their own and no views, whose bases torch.compile would look at too
    index = torch.zeros(*shape, width, dtype=torch.int32, device=col.device)
    index.view(-1, width)[row, place] = col.to(torch.int32)
    counts = torch.zeros(shape, dtype=torch.int32, device=col.device)
    counts.view(-1).copy_(num)
    return Side(counts, index)


def block_mask(lists: BlockLists, mod: MaskMod, device: torch.device) -> Any:
    """A torch BlockMask, there. Lists on the CPU are copied from pinned memory, and nobody waits."""
    from torch.nn.attention.flex_attention import BlockMask

    by_row, full_by_row, by_col, full_by_col = (Side(*(_sent(t, device) for t in s)) for s in sides(lists))
    return BlockMask(
        seq_lengths=(lists.queries, lists.keys),
        kv_num_blocks=by_row.num,
        kv_indices=by_row.which,
        full_kv_num_blocks=full_by_row.num,
        full_kv_indices=full_by_row.which,
        q_num_blocks=by_col.num,
        q_indices=by_col.which,
        full_q_num_blocks=full_by_col.num,
        full_q_indices=full_by_col.which,
        BLOCK_SIZE=(lists.block, lists.block),
        mask_mod=mod,
    )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def bits_mod(mask: Mask, lists: BlockLists, device: torch.device) -> MaskMod:
    """The mask as bits of its partial blocks, looked up: for masks that are no formula of their indices.

    Takes block^2 / 8 bytes for each partial block, 2 KiB of 128, and 4 bytes for each block that could be.
    """
    sizes = Sizes(lists.batch, lists.heads, lists.queries, lists.keys, lists.row.device)
    partial = (~lists.is_full).nonzero().squeeze(1)
    block = lists.block
    words = torch.zeros(partial.numel() + 1, block, block // _WORD, dtype=torch.int32, device=sizes.device)
    weights = (1 << torch.arange(_WORD, device=sizes.device)).to(torch.int64)
    step = max(1, (1 << 22) // block**2)
    for at in range(0, partial.numel(), step):
        which = partial[at : at + step]
        visible = dense_tiles(mask, sizes, block, lists.row[which], lists.col[which])
        packed = (visible.unflatten(-1, (-1, _WORD)) * weights).sum(-1)
        # the 32nd bit becomes the sign, which shifting brings back
        words[1 + at : 1 + at + step] = packed.to(torch.int32)
    num_rows = lists.batch * lists.heads * lists.num_rows
    word_indices = torch.zeros(num_rows, lists.num_cols, dtype=torch.int32, device=sizes.device)
    numbers = torch.arange(1, partial.numel() + 1, dtype=torch.int32, device=sizes.device)
    word_indices[lists.row[partial], lists.col[partial]] = numbers
    word_indices = _sent(word_indices.view(lists.batch, lists.heads, lists.num_rows, lists.num_cols), device)
    words = _sent(words, device)
    by_sample, by_head = lists.batch > 1, lists.heads > 1

    def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        word_index = word_indices[b if by_sample else 0 * b, h if by_head else 0 * h, q // block, kv // block]
        word = words[word_index, q % block, (kv % block) // _WORD]
        return ((word >> (kv % _WORD)) & 1) == 1

    return function
