"""What range of numbers the bits are for: an observer sees tensors, one after the other, and names a range.

A wider range clips less and has coarser steps. "min-max" clips nothing; "percentile" clips 1 number of 10,000, half at each end;
"least-error" and "entropy" search the clipping that costs least, by squared error or by the divergence of Kullback and Leibler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.layer_calls import watched_layers
from flatout.shrink.quantise.affine import Affine, for_range

Kind = Literal["min-max", "percentile", "least-error", "entropy"]
_BINS: Final = 2048
"""On each side of 0, as TensorRT's calibration has them (Migacz, 8-bit inference with TensorRT, GTC 2017)."""
_TRIED: Final = 100
_FRACTION: Final = 0.9999
"""Of all numbers, inside the range of "percentile"."""
_LEVELS: Final = 128
"""Magnitudes that 8 bits have."""


class RangeObserver:
    """Counts of what was observed, in equal bins on both sides of 0, whose width doubles when a number lies outside."""

    def __init__(self, kind: Kind = "least-error") -> None:
        if kind not in get_args(Kind):
            raise UsageError(f"observer '{kind}' is none of {', '.join(get_args(Kind))}")
        self.limit = 2.0**-40
        self.counts = torch.zeros(2 * _BINS, dtype=torch.float64)
        self._kind, self._extremes = kind, torch.empty(0, dtype=torch.float64)

    def observe(self, x: Tensor) -> None:
        """Count the numbers of a tensor. UsageError for NaN or infinity."""
        if not x.numel() or not bool(torch.isfinite(x).all()):
            raise UsageError("an observed tensor is empty or holds NaN or infinity; its range says nothing")
        x = x.detach().double().flatten().cpu()
        self._extremes = torch.stack(torch.cat((self._extremes, x)).aminmax())
        largest = float(x.abs().max())
        while self.limit < largest:
            middle = self.counts.view(_BINS, 2).sum(1)
            self.counts = torch.nn.functional.pad(middle, (_BINS // 2, _BINS // 2))
            self.limit *= 2
        at = ((x / self.limit + 1) * _BINS).long().clamp(0, 2 * _BINS - 1)
        self.counts += torch.bincount(at, minlength=2 * _BINS)

    def range(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest number to represent. UsageError before anything was observed."""
        if not len(self._extremes):
            raise UsageError("an observer has seen nothing; give it batches before its range is asked for")
        low, high = self._extremes
        match self._kind:
            case "percentile":
                limits = self._percentile()
                return torch.maximum(low, limits[0]), torch.minimum(high, limits[1])
            case "least-error":
                share = self._least_error(low, high)
                return low * share, high * share
            case "entropy":
                limit = self._entropy()
                return torch.maximum(low, -limit), torch.minimum(high, limit)
        return low, high

    def _percentile(self) -> Tensor:
        """Both ends, to the width of a bin."""
        below = self.counts.cumsum(0) / self.counts.sum()
        width, outside = self.limit / _BINS, (1 - _FRACTION) / 2
        first = int((below > outside).double().argmax())
        last = int((below >= 1 - outside - 1e-12).double().argmax())
        return torch.tensor([first, last + 1], dtype=torch.float64) * width - self.limit

    def _least_error(self, low: Tensor, high: Tensor) -> float:
        """The share of all that was observed, of a hundred, whose bits have the least squared error."""
        used = self.counts > 0
        centres = (((torch.arange(2 * _BINS, dtype=torch.float64) + 0.5) / _BINS - 1) * self.limit)[used]

        def error(share: float) -> float:
            moved = for_range(low * share, high * share, symmetric=False).fake_quantise(centres) - centres
            return float((self.counts[used] * moved**2).sum())

        return min((part / _TRIED for part in range(_TRIED, 0, -1)), key=error)

    def _entropy(self) -> Tensor:
        """The limit of magnitudes whose rounded distribution diverges least from what was observed (Migacz, GTC 2017)."""
        counts = self.counts[_BINS:] + self.counts[:_BINS].flip(0)
        used = int(counts.nonzero().max()) + 1
        tried = range(used, min(_LEVELS, used) - 1, -max(1, used // _TRIED))
        best = min(tried, key=lambda bins: _divergence(counts, bins=bins, levels=min(_LEVELS, bins)))
        return torch.tensor(best / _BINS * self.limit, dtype=torch.float64)


def _divergence(counts: Tensor, *, bins: int, levels: int) -> float:
    """Divergence of the first bins merged to levels from the same bins with all beyond put into the last."""
    observed = counts[:bins].clone()
    inside = observed.clone()
    observed[-1] += counts[bins:].sum()
    level = torch.arange(bins) * levels // bins
    total = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, inside)
    filled = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, (inside > 0).double())
    spread = torch.where(inside > 0, (total / filled.clamp(min=1))[level], 0.0)
    if float(spread.sum()) == 0:
        return float("inf")
    p, q = observed / observed.sum(), spread / spread.sum()
    # What was observed where the levels have nothing would diverge without end: as likely as the smallest number there is.
    there = p > 0
    return float((p[there] * (p[there] / q[there].clamp(min=1e-12)).log()).sum())


def calibrated_inputs(
    model: nn.Module, paths: Sequence[str], batches: Iterable[Any], *, kind: Kind
) -> dict[str, Affine]:
    """The transformation of each layer's inputs, as the observer of this kind has it after all batches."""
    seeing = {path: RangeObserver(kind) for path in paths}

    def see(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if first is not None:
            seeing[path].observe(first)

    with watched_layers(model, paths, see), torch.inference_mode():
        for batch in batches:
            model(*(batch if isinstance(batch, tuple | list) else (batch,)))
    found = {}
    for path, by in seeing.items():
        try:
            found[path] = for_range(*by.range(), symmetric=False)
        except UsageError as e:
            raise UsageError(f"layer '{path}' cannot be calibrated: {e}") from e
    return found
