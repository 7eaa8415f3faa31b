"""The blocks of queries by keys that a mask touches, and those that it fills: in time and memory of the blocks that there are."""

# R rows of queries of all samples and heads, N intervals or blocks

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Mask, Sizes
from flatout.blocks.kernels.attention.sets import KeySets, covered, members_with
from flatout.core.errors import UsageError

_LOOKED_AT: Final = 1 << 22
"""Pairs of query and key that are looked at together, where a mask has to be: 4 Mi, some 100 MiB of indices."""


@dataclass(frozen=True)
class BlockLists:
    """The blocks of (batch, heads, queries, keys) that a mask touches, sorted by row, then column.

    `row` (N,) is (sample * heads + head) * num_rows + row of blocks, `col` (N,) the column; `is_full` (N,) tells where every
    query of the block sees every key. The last row or column of blocks, where it is cut off, is never full.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    block: int
    row: Tensor
    col: Tensor
    is_full: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of blocks of one head."""
        return -(-self.queries // self.block)

    @property
    def num_cols(self) -> int:
        """Columns of blocks of one head."""
        return -(-self.keys // self.block)


def block_lists(
    mask: Mask, queries: int, keys: int, *, block: int = 128, device: torch.device | str = "cpu"
) -> BlockLists:
    """The blocks of `block` queries by `block` keys that `mask` touches: the sets that torch's create_block_mask finds.

    Time and memory go with the blocks and with the intervals of keys, one or two a row for most structures; only where the
    structures leave a block open, its pairs are looked at, a few hundred blocks at a time. Work on a GPU makes the host wait, on
    the CPU nothing does. Raises UsageError for lengths that the mask is not made for.
    """
    if block < 1 or queries < 0 or keys < 0:
        raise UsageError(
            f"block {block}, queries {queries}, keys {keys}: a block has at least one, and there are at least none"
        )
    mask.check(queries, keys)
    here = torch.device(device)
    mask = mask.to(here)
    sizes = Sizes(mask.batch, mask.heads, queries, keys, here)
    known = mask.blocks(sizes, block)
    if known is not None:
        return BlockLists(mask.batch, mask.heads, queries, keys, block, *known)
    bounds = mask.bounds(sizes)
    row, col, is_full = members_with(_touched(bounds.perhaps, sizes, block), _covered(bounds.surely, sizes, block))
    if not bounds.is_exact:
        any_, all_ = _looked_at(mask, sizes, block, row, col, is_full)
        row, col, is_full = row[any_], col[any_], all_[any_]
    return BlockLists(mask.batch, mask.heads, queries, keys, block, row, col, is_full)


def _touched(sets: KeySets, sizes: Sizes, block: int) -> KeySets:
    """The blocks in which some row sees some key, as sets of columns by row of blocks."""
    row, lo, hi = sets.listed()
    num_rows, num_cols, row = _rows_of_blocks(row, sizes, block)
    row, lo, hi, _ = _once(row, lo // block, -(-hi // block), num_rows, num_cols)
    return covered(row, lo, hi, num_rows=num_rows, num_keys=num_cols)


def _covered(sets: KeySets, sizes: Sizes, block: int) -> KeySets:
    """The blocks of which every row sees every key."""
    row, lo, hi = sets.listed()
    num_rows, num_cols, row = _rows_of_blocks(row, sizes, block)
    lo, hi = -(-lo // block), hi // block
    some = lo < hi
    row, lo, hi, times = _once(row[some], lo[some], hi[some], num_rows, num_cols)
    return covered(row, lo, hi, num_rows=num_rows, num_keys=num_cols, times=times, at_least=block)


def _rows_of_blocks(row: Tensor, sizes: Sizes, block: int) -> tuple[int, int, Tensor]:
    """How many rows and columns of blocks there are, and in which each row of queries lies."""
    each = -(-sizes.queries // block)
    group = row // sizes.queries if sizes.num_rows > sizes.queries else 0
    of_blocks = group * each + (row - group * sizes.queries) // block
    return sizes.batch * sizes.heads * each, -(-sizes.keys // block), of_blocks


def _once(row: Tensor, lo: Tensor, hi: Tensor, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Equal intervals that follow one another, once, with how many there are: neighbouring queries see much the same."""
    span = num_cols + 1
    if num_rows * span * span >= 1 << 63:
        return row, lo, hi, torch.ones_like(row)
    code, times = ((row * span + lo) * span + hi).unique_consecutive(return_counts=True)
    code, hi = code // span, code % span
    return code // span, code % span, hi, times


def _looked_at(
    mask: Mask, sizes: Sizes, block: int, row: Tensor, col: Tensor, is_full: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each block, whether some pair is seen, and whether all are; blocks known to be full are not looked at."""
    any_, all_ = is_full.clone(), is_full.clone()
    open_ = (~is_full).nonzero().squeeze(1)
    for part in open_.split(max(1, _LOOKED_AT // block**2)):
        visible = dense_tiles(mask, sizes, block, row[part], col[part]).flatten(1)
        any_[part], all_[part] = visible.any(dim=1), visible.all(dim=1)
    return any_, all_


def dense_tiles(mask: Mask, sizes: Sizes, block: int, row: Tensor, col: Tensor) -> Tensor:
    """(N, block, block): the mask within each block, false beyond the last query and key."""
    each = -(-sizes.queries // block)
    group, inside = row // each, torch.arange(block, device=row.device)
    q = ((row % each) * block)[:, None] + inside
    kv = (col * block)[:, None] + inside
    is_there = (q < sizes.queries)[:, :, None] & (kv < sizes.keys)[:, None, :]
    visible = mask.at(
        (group // sizes.heads)[:, None, None],
        (group % sizes.heads)[:, None, None],
        q.clamp(max=sizes.queries - 1)[:, :, None],
        kv.clamp(max=sizes.keys - 1)[:, None, :],
    )
    return visible & is_there
