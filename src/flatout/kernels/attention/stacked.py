"""One mask for each head, or for each sample."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.attention.mask import Bounds, Mask, MaskMod, Sizes, exact
from flatout.kernels.attention.sets import KeySets


class Stacked(Mask):
    """One mask a head, or one a sample."""

    def __init__(self, masks: Sequence[Mask], *, by: str) -> None:
        self.masks, self.by = tuple(masks), by
        inner = {getattr(mask, by) for mask in masks}
        other = "heads" if by == "batch" else "batch"
        across = {getattr(mask, other) for mask in masks} - {1}
        if inner != {1} or len(across) > 1:
            raise UsageError(f"masks to be stacked by {by} must be the same for all {by}, and of one size in {other}")
        self.is_formula = all(mask.is_formula for mask in self.masks)
        setattr(self, by, len(self.masks))
        setattr(self, other, across.pop() if across else 1)

    def mod(self) -> MaskMod:
        mods, by_head = [mask.mod() for mask in self.masks], self.by == "heads"

        def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            which = h if by_head else b
            seen = (which == 0) & mods[0](b, h, q, kv)
            for number, mod in enumerate(mods[1:], start=1):
                seen = seen | ((which == number) & mod(b, h, q, kv))
            return seen

        return function

    def bounds(self, sizes: Sizes) -> Bounds:
        of_one = sizes._replace(batch=1) if self.by == "batch" else sizes._replace(heads=1)
        parts = [mask.bounds(of_one) for mask in self.masks]
        surely = self._interleaved([part.surely for part in parts], sizes)
        if all(part.is_exact for part in parts):
            return exact(surely)
        return Bounds(surely, self._interleaved([part.perhaps for part in parts], sizes))

    def _interleaved(self, parts: list[KeySets], sizes: Sizes) -> KeySets:
        rows, los, his = [], [], []
        for number, part in enumerate(parts):
            row, lo, hi = part.listed()
            if self.by == "heads":
                sample, query = row // sizes.queries, row % sizes.queries
                row = (sample * sizes.heads + number) * sizes.queries + query
            else:
                row = row + number * sizes.heads * sizes.queries
            rows.append(row)
            los.append(lo)
            his.append(hi)
        row, order = torch.cat(rows).sort(stable=True)
        return KeySets(sizes.num_rows, sizes.keys, row, torch.cat(los)[order], torch.cat(his)[order])

    @property
    def signature(self) -> Hashable:
        return ("stacked", self.by, *(mask.signature for mask in self.masks))

    def to(self, device: torch.device) -> Mask:
        return Stacked([mask.to(device) for mask in self.masks], by=self.by)

    def check(self, queries: int, keys: int) -> None:
        for mask in self.masks:
            mask.check(queries, keys)

    def __repr__(self) -> str:
        return f"per_{'head' if self.by == 'heads' else 'sample'}({', '.join(map(repr, self.masks))})"
