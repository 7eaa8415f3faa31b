"""A set of keys for each row, as a union of intervals: closed under and, or, not; never a row times a key in memory."""

# R rows, N intervals of all rows together

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeySets:
    """A set, for each of `num_rows` rows, of the keys 0 to `num_keys` - 1.

    Interval n is the keys lo[n] to hi[n] - 1 of row row[n]; the intervals are sorted by row, then by key, and neither overlap
    nor touch. `row` is None where there is exactly one for each row, in order; it may then be empty (lo >= hi). All are int64.
    """

    num_rows: int
    num_keys: int
    row: Tensor | None
    lo: Tensor
    hi: Tensor

    def listed(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, lo, hi), each (N,), without empty intervals."""
        if self.row is not None:
            return self.row, self.lo, self.hi
        row = (self.lo < self.hi).nonzero().squeeze(1)
        return row, self.lo[row], self.hi[row]

    def __and__(self, other: KeySets) -> KeySets:
        if self.row is None and other.row is None:
            return one_interval(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi), self.num_keys)
        return self._combined(other, lambda state: state == 3)

    def __or__(self, other: KeySets) -> KeySets:
        return self._combined(other, lambda state: state > 0)

    def __invert__(self) -> KeySets:
        return every_key(self.num_rows, self.num_keys, self.lo.device)._combined(self, lambda state: state == 1)

    def _combined(self, other: KeySets, is_in: Callable[[Tensor], Tensor]) -> KeySets:
        """What `is_in` takes of: 1 in this one only, 2 in the other only, 3 in both."""
        positions, changes = [], []
        for weight, (row, lo, hi) in ((1, self.listed()), (2, other.listed())):
            positions += [row * (self.num_keys + 1) + lo, row * (self.num_keys + 1) + hi]
            changes += [torch.full_like(lo, weight), torch.full_like(hi, -weight)]
        return _swept(torch.cat(positions), torch.cat(changes), is_in, self.num_rows, self.num_keys)


def one_interval(lo: Tensor, hi: Tensor, num_keys: int) -> KeySets:
    """The keys lo[r] to hi[r] - 1 for each row r; both (R,) and cut to what there is."""
    return KeySets(lo.numel(), num_keys, None, lo.clamp(min=0), hi.clamp(max=num_keys))


def every_key(num_rows: int, num_keys: int, device: torch.device) -> KeySets:
    """All keys for every row."""
    lo = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return one_interval(lo, torch.full_like(lo, num_keys), num_keys)


def covered(
    row: Tensor, lo: Tensor, hi: Tensor, *, num_rows: int, num_keys: int, times: Tensor | int = 1, at_least: int = 1
) -> KeySets:
    """The keys that lie in `at_least` so many of the intervals, each of which counts `times`, a number or (N,).

    Intervals may overlap and come in any order; none is empty.
    """
    counts = torch.as_tensor(times, device=lo.device).expand_as(lo)
    base = row * (num_keys + 1)
    positions, changes = torch.cat([base + lo, base + hi]), torch.cat([counts, -counts])
    return _swept(positions, changes, lambda count: count >= at_least, num_rows, num_keys)


def members(sets: KeySets) -> tuple[Tensor, Tensor]:
    """(row, column) of each member, sorted."""
    row, lo, hi = sets.listed()
    num = hi - lo
    total = int(num.sum())
    which = torch.arange(num.numel(), device=lo.device).repeat_interleave(num, output_size=total)
    first = num.cumsum(0) - num
    return row[which], lo[which] + torch.arange(total, device=lo.device) - first[which]


def members_with(touched: KeySets, full: KeySets) -> tuple[Tensor, Tensor, Tensor]:
    """(row, column, is_full) of each member of `touched`, sorted; full are those that are members of `full` too."""
    row, col = members(touched)
    full_row, full_col = members(full)
    num = touched.num_keys
    return row, col, torch.isin(row * num + col, full_row * num + full_col, assume_unique=True)


def _swept(
    positions: Tensor, changes: Tensor, is_in: Callable[[Tensor], Tensor], num_rows: int, num_keys: int
) -> KeySets:
    """The stretches in which the sum of the changes up to there is what `is_in` wants.

    A position is row * (num_keys + 1) + key: the last of a row belongs to no key, so that no stretch goes on into the next row.
    """
    at, order = positions.sort()
    state = changes[order].cumsum(0)
    is_last = torch.ones_like(at, dtype=torch.bool)
    is_last[:-1] = at[1:] != at[:-1]  # of several changes at one position the sum counts
    at, inside = at[is_last], is_in(state[is_last])
    before = torch.zeros_like(inside)
    before[1:] = inside[:-1]
    begin, end = at[inside & ~before], at[before & ~inside]
    row = begin // (num_keys + 1)
    base = row * (num_keys + 1)
    return KeySets(num_rows, num_keys, row, begin - base, end - base)
