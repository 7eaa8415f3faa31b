"""What range of numbers the bits are for: observers see tensors, one after the other, and name a range.

A wider range clips less and has coarser steps. `MinMax` clips nothing; `Percentile` clips a stated fraction; `LeastError` and
`Entropy` search the clipping that costs least, by squared error or by the divergence of Kullback and Leibler.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from flatout.compression.quantising.affine import for_range
from flatout.errors import UsageError

Kind = Literal["min-max", "percentile", "least-error", "entropy"]
_BINS: Final = 2048
"""On each side of 0, as TensorRT's calibration has them (Migacz, 8-bit inference with TensorRT, GTC 2017)."""
_TRIED: Final = 100


class Observer(Protocol):
    """Sees tensors and names the range that bits should be spent on."""

    def see(self, x: Tensor) -> None:
        """Take a tensor into account. UsageError for NaN or infinity."""

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest number to represent. UsageError before anything was seen."""


class MinMax:
    """All that was seen, in a whole tensor or in each channel of `dim`."""

    def __init__(self, *, dim: int | None = None) -> None:
        self._dim = dim
        self._range: tuple[Tensor, Tensor] | None = None

    def see(self, x: Tensor) -> None:
        """Widen the range to this tensor's."""
        x = _finite(x)
        if self._dim is None:
            low, high = x.amin(), x.amax()
        else:
            flat = x.movedim(self._dim, 0).flatten(1)
            low, high = flat.amin(1), flat.amax(1)
        if self._range is not None:
            low, high = torch.minimum(low, self._range[0]), torch.maximum(high, self._range[1])
        self._range = low, high

    def range(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest number."""
        if self._range is None:
            raise UsageError("an observer has seen nothing; give it batches before its range is asked for")
        return self._range


class Histogram:
    """Counts of what was seen, in equal bins on both sides of 0; its width doubles when a number lies outside.

    Where nothing was seen but zeros, everything is in the middle.
    """

    def __init__(self) -> None:
        self.limit = 2.0**-40
        self.counts = torch.zeros(2 * _BINS, dtype=torch.float64)
        self._extremes = MinMax()

    def see(self, x: Tensor) -> None:
        """Count this tensor's numbers."""
        x = _finite(x).detach().double().flatten().cpu()
        self._extremes.see(x)
        largest = float(x.abs().max())
        while self.limit < largest:
            middle = self.counts.view(_BINS, 2).sum(1)
            self.counts = torch.nn.functional.pad(middle, (_BINS // 2, _BINS // 2))
            self.limit *= 2
        at = ((x / self.limit + 1) * _BINS).long().clamp(0, 2 * _BINS - 1)
        self.counts += torch.bincount(at, minlength=2 * _BINS)

    @property
    def centres(self) -> Tensor:
        """The middle of each bin."""
        return ((torch.arange(2 * _BINS, dtype=torch.float64) + 0.5) / _BINS - 1) * self.limit

    def extremes(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest number seen, exactly."""
        return self._extremes.range()

    def folded(self) -> Tensor:
        """Counts of magnitudes: [bins], from 0 up."""
        return self.counts[_BINS:] + self.counts[:_BINS].flip(0)


class Percentile:
    """The range outside of which lies `1 - kept` of all numbers, half at each end."""

    def __init__(self, kept: float = 0.9999) -> None:
        if not 0 < kept <= 1:
            raise UsageError(f"kept {kept} is not in 0..1, 0 excluded: the fraction of numbers inside the range")
        self._kept, self._seen = kept, Histogram()

    def see(self, x: Tensor) -> None:
        """Count this tensor's numbers."""
        self._seen.see(x)

    def range(self) -> tuple[Tensor, Tensor]:
        """To a bin's width."""
        low, high = self._seen.extremes()
        below = self._seen.counts.cumsum(0) / self._seen.counts.sum()
        width, outside = self._seen.limit / _BINS, (1 - self._kept) / 2
        first = int((below > outside).double().argmax())
        last = int((below >= 1 - outside - 1e-12).double().argmax())
        edges = torch.tensor([first * width - self._seen.limit, (last + 1) * width - self._seen.limit])
        return torch.maximum(low, edges[0].to(low)), torch.minimum(high, edges[1].to(high))


class LeastError:
    """The range, a fraction of all that was seen, whose bits have the least squared error."""

    def __init__(self, *, bits: int = 8, symmetric: bool = True) -> None:
        self._bits, self._symmetric, self._seen = bits, symmetric, Histogram()

    def see(self, x: Tensor) -> None:
        """Count this tensor's numbers."""
        self._seen.see(x)

    def range(self) -> tuple[Tensor, Tensor]:
        """The best of a hundred."""
        low, high = self._seen.extremes()
        used = self._seen.counts > 0
        centres, counts = self._seen.centres[used], self._seen.counts[used]
        best, found = float("inf"), (low, high)
        for part in range(_TRIED, 0, -1):
            at = low * (part / _TRIED), high * (part / _TRIED)
            moved = for_range(*at, bits=self._bits, symmetric=self._symmetric).rounded(centres) - centres
            error = float((counts * moved**2).sum())
            if error < best:
                best, found = error, at
        return found


class Entropy:
    """The range whose rounded distribution of magnitudes diverges least from what was seen (Migacz, GTC 2017)."""

    def __init__(self, *, bits: int = 8) -> None:
        self._levels, self._seen = 2 ** (bits - 1), Histogram()

    def see(self, x: Tensor) -> None:
        """Count this tensor's numbers."""
        self._seen.see(x)

    def range(self) -> tuple[Tensor, Tensor]:
        """To a bin's width; the same limit on both sides."""
        low, high = self._seen.extremes()
        counts = self._seen.folded()
        used = int(counts.nonzero().max()) + 1
        best, found = float("inf"), used
        for bins in range(used, min(self._levels, used) - 1, -max(1, used // _TRIED)):
            diverges = _divergence(counts, bins=bins, levels=min(self._levels, bins))
            if diverges < best:
                best, found = diverges, bins
        limit = torch.tensor(found / _BINS * self._seen.limit).to(low)
        return torch.maximum(low, -limit), torch.minimum(high, limit)


def _divergence(counts: Tensor, *, bins: int, levels: int) -> float:
    """Of the first bins merged to levels from the same with all beyond put into the last."""
    seen = counts[:bins].clone()
    inside = seen.clone()
    seen[-1] += counts[bins:].sum()
    level = torch.arange(bins) * levels // bins
    total = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, inside)
    filled = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, (inside > 0).double())
    spread = torch.where(inside > 0, (total / filled.clamp(min=1))[level], 0.0)
    if float(spread.sum()) == 0:
        return float("inf")
    p, q = seen / seen.sum(), spread / spread.sum()
    # What was seen where the levels have nothing cannot be told apart from nothing: as likely as the smallest number there is.
    there = p > 0
    return float((p[there] * (p[there] / q[there].clamp(min=1e-12)).log()).sum())


def observer(kind: Kind = "least-error", *, bits: int = 8, symmetric: bool = True) -> Observer:
    """An observer of whole tensors by its name. UsageError for another name."""
    if kind == "min-max":
        return MinMax()
    if kind == "percentile":
        return Percentile()
    if kind == "least-error":
        return LeastError(bits=bits, symmetric=symmetric)
    if kind == "entropy":
        return Entropy(bits=bits)
    raise UsageError(f"observer '{kind}' is none of min-max, percentile, least-error, entropy")


def _finite(x: Tensor) -> Tensor:
    if not x.numel() or not bool(torch.isfinite(x).all()):
        raise UsageError("an observed tensor is empty or holds NaN or infinity; its range says nothing")
    return x.detach()
