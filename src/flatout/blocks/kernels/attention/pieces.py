"""A mask cut into pieces that one plain kernel can compute: rows of queries with the keys that they see, all of them, up to the
diagonal, or under a small mask. What all pieces hold together grows with the blocks that there are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.blocks import block_lists, dense_tiles
from flatout.blocks.kernels.attention.mask import Mask, Sizes
from flatout.blocks.kernels.attention.sets import KeySets

_TILE: Final = 192
"""Queries of a piece under a mask: torch's kernel for CPUs takes 64 at a time from here on, and 32 below."""
_LONG: Final = 64
"""Queries from which on a stretch that needs no mask is a piece of its own."""
_BLOCK: Final = 64
_ALONE: Final = 512
"""Keys that every query of a tile sees, from which on they are computed apart from those under the mask."""


class MaskPart(NamedTuple):
    """Keys for a piece: runs of them, [begin, end). `visible` (queries, keys), None where all are, or up to the diagonal."""

    runs: tuple[tuple[int, int], ...]
    is_causal: bool = False
    visible: Tensor | None = None


class MaskPiece(NamedTuple):
    """The queries from `begin` to `end` - 1, and the keys that they see, in parts that are joined by their log-sum-exp."""

    begin: int
    end: int
    parts: tuple[MaskPart, ...]


Pieces = tuple[tuple[int | None, int | None, tuple[MaskPiece, ...]], ...]
"""Those of each sample and head that the mask distinguishes; one entry (None, None) where it distinguishes none."""


def pieces_of(mask: Mask, queries: int, keys: int, *, is_tiled: bool = False) -> Pieces:
    """The mask in pieces, on the CPU. `is_tiled` keeps each piece to a tile of queries, for scores that are made one by one."""
    mask.check(queries, keys)
    sizes = Sizes(mask.batch, mask.heads, queries, keys, torch.device("cpu"))
    bounds = mask.bounds(sizes)
    if bounds.is_exact and bounds.surely.row is None:
        found = _by_interval(bounds.surely, sizes, is_tiled=is_tiled)
    else:
        found = _by_block(mask, sizes)
    groups = []
    for number, pieces in enumerate(found):
        sample = number // mask.heads if mask.batch > 1 else None
        groups.append((sample, number % mask.heads if mask.heads > 1 else None, tuple(pieces)))
    return tuple(groups)


def _by_interval(sets: KeySets, sizes: Sizes, *, is_tiled: bool) -> list[list[MaskPiece]]:
    """Pieces where each row sees one interval: stretches of rows that see the same, or one key more each, need no mask."""
    is_empty = sets.lo >= sets.hi
    bounds = torch.stack([sets.lo, sets.hi]).masked_fill(is_empty, 0).view(2, -1, sizes.queries)
    return [_stretches(lo, hi, is_tiled=is_tiled) for lo, hi in bounds.unbind(1)]


def _stretches(lo: Tensor, hi: Tensor, *, is_tiled: bool) -> list[MaskPiece]:
    num = lo.numel()
    if not num:
        return []
    same_lo, rise = lo.diff() == 0, hi.diff()
    # of a row against the one before: 1 sees the same, 2 one key more, 0 else
    kind = torch.zeros(num, dtype=torch.int64)
    kind[1:] = torch.where(same_lo & (rise == 0), 1, torch.where(same_lo & (rise == 1), 2, 0))
    begins = kind == 0
    begins[1:] |= (kind[:-1] != 0) & (kind[1:] != kind[:-1])
    start = begins.nonzero().squeeze(1)
    end = torch.cat([start[1:], start.new_full((1,), num)])
    long = (end - start >= _LONG) if not is_tiled else torch.zeros_like(start, dtype=torch.bool)
    pieces, done = [], 0
    for begin, stop in torch.stack([start[long], end[long]], dim=1).tolist():
        pieces += _masked(lo, hi, done, begin)
        pieces.append(_unmasked(lo, hi, begin, stop, is_rising=bool(kind[begin + 1] == 2)))
        done = stop
    pieces += _masked(lo, hi, done, num)
    return [piece for piece in pieces if piece.parts]


def _unmasked(lo: Tensor, hi: Tensor, begin: int, end: int, *, is_rising: bool) -> MaskPiece:
    first, last = int(lo[begin]), int(hi[begin])
    if not is_rising:
        return MaskPiece(begin, end, (MaskPart(((first, last),)),) if first < last else ())
    square = MaskPart(((last - 1, last - 1 + end - begin),), is_causal=True)
    return MaskPiece(begin, end, (MaskPart(((first, last - 1),)), square) if first < last - 1 else (square,))


def _masked(lo: Tensor, hi: Tensor, begin: int, end: int) -> list[MaskPiece]:
    """The rows in tiles, each with all keys that one of them sees."""
    pieces = []
    for at in range(begin, end, _TILE):
        stop = min(at + _TILE, end)
        low, high = lo[at:stop], hi[at:stop]
        some = low < high
        if not bool(some.any()):
            continue
        first, last = int(low[some].min()), int(high.max())
        keys = torch.arange(first, last)
        visible = (keys >= low[:, None]) & (keys < high[:, None])
        part = MaskPart(((first, last),), visible=None if bool(visible.all()) else visible)
        pieces.append(MaskPiece(at, stop, (part,)))
    return pieces


def _by_block(mask: Mask, sizes: Sizes) -> list[list[MaskPiece]]:
    """Pieces of one row of blocks each, for any mask."""
    lists = block_lists(mask, sizes.queries, sizes.keys, block=_BLOCK)
    found: list[list[MaskPiece]] = [[] for _ in range(sizes.batch * sizes.heads)]
    counts = lists.row.bincount(minlength=lists.num_rows * len(found)).tolist()
    at = 0
    for row, num in enumerate(counts):
        group, number = divmod(row, lists.num_rows)
        begin = number * _BLOCK
        if num:
            here = slice(at, at + num)
            parts = _parts(mask, sizes, lists.row[here], lists.col[here], lists.is_full[here], begin)
            found[group].append(MaskPiece(begin, min(begin + _BLOCK, sizes.queries), parts))
        at += num
    return found


def _parts(mask: Mask, sizes: Sizes, row: Tensor, col: Tensor, is_full: Tensor, begin: int) -> tuple[MaskPart, ...]:
    num = min(_BLOCK, sizes.queries - begin)
    is_separate = is_full if int(is_full.sum()) * _BLOCK >= _ALONE else torch.zeros_like(is_full)
    parts = []
    if bool(is_separate.any()):
        parts.append(MaskPart(_runs(col[is_separate], sizes.keys)))
    if not bool(is_separate.all()):
        rest = ~is_separate
        visible = torch.ones(int(rest.sum()), _BLOCK, _BLOCK, dtype=torch.bool)
        looked = ~is_full[rest]
        visible[looked] = dense_tiles(mask, sizes, _BLOCK, row[rest][looked], col[rest][looked])
        runs = _runs(col[rest], sizes.keys)
        wide = visible.transpose(0, 1).reshape(_BLOCK, -1)[:num, : sum(hi - lo for lo, hi in runs)]
        parts.append(MaskPart(runs, visible=None if bool(wide.all()) else wide))
    return tuple(parts)


def _runs(col: Tensor, keys: int) -> tuple[tuple[int, int], ...]:
    """Keys of the columns of blocks, neighbours joined; the last block may be cut off."""
    is_start = torch.ones_like(col, dtype=torch.bool)
    is_start[1:] = col[1:] != col[:-1] + 1
    first = col[is_start]
    last = torch.cat([col[:-1][is_start[1:]], col[-1:]])
    return tuple(
        (lo * _BLOCK, min((hi + 1) * _BLOCK, keys)) for lo, hi in zip(first.tolist(), last.tolist(), strict=True)
    )
