"""Masks that plain kernels know: a window, causal or not, within documents that lie behind one another."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.kernels.attention.mask import Both, Mask
from flatout.kernels.attention.structures import Documents, Everything, Window


@dataclass(frozen=True)
class Band:
    """Keys from `left` before the query to `right` after it, None for all on that side, of the query's document."""

    left: int | None = None
    right: int | None = None
    documents: Documents | None = None

    @property
    def is_causal(self) -> bool:
        """Every key up to the query's place."""
        return self.left is None and self.right == 0

    @property
    def is_open(self) -> bool:
        """No bound on either side."""
        return self.left is None and self.right is None


def band_of(mask: Mask) -> Band | None:
    """The band that the mask is, None where it is more than that."""
    if isinstance(mask, Everything):
        return Band()
    if isinstance(mask, Window):
        left, right = mask.left, mask.right
        is_same_for_all = (left is None or isinstance(left, int)) and (right is None or isinstance(right, int))
        return Band(left, right) if is_same_for_all else None  # type: ignore[arg-type]
    if isinstance(mask, Documents):
        return Band(documents=mask) if mask.offsets is not None else None
    if not isinstance(mask, Both):
        return None
    one, two = (band_of(part) for part in mask.parts)
    if one is None or two is None or (one.documents is not None and two.documents is not None):
        return None
    return Band(_nearer(one.left, two.left), _nearer(one.right, two.right), one.documents or two.documents)


def _nearer(one: int | None, two: int | None) -> int | None:
    return min(one, two) if one is not None and two is not None else two if one is None else one
