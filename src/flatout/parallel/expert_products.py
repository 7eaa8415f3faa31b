"""The experts' feed-forward on rows that are sorted by expert: one grouped product for all, or one product each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# R rows, E experts, C channels, F inner width
Way = Literal["loop", "grouped"]
Activation = Callable[[Tensor], Tensor]
# bfloat16 numbers in 16 bytes, to which a grouped product's loads are aligned (pytorch pull request 150374).
_ALIGNED = 8


class Weights(NamedTuple):
    """Of all experts at hand; `gate_ECF` None where they have none."""

    up_ECF: Tensor
    gate_ECF: Tensor | None
    down_EFC: Tensor

    def to(self, dtype: torch.dtype) -> Weights:
        """All of them in a dtype."""
        gate = None if self.gate_ECF is None else self.gate_ECF.to(dtype)
        return Weights(self.up_ECF.to(dtype), gate, self.down_EFC.to(dtype))


class Chosen(NamedTuple):
    """How the products are done, and why not the other way; `reason` is '' where that was asked for."""

    way: Way
    reason: str


def why_not_grouped(rows_RC: Tensor, weights: Weights) -> str:
    """Why torch's grouped product does not serve here; '' where it does."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if rows_RC.dtype is not torch.bfloat16:
        return f"products are in {rows_RC.dtype}, grouped ones in bfloat16"
    wrong = [width for width in weights.up_ECF.shape[1:] if width % _ALIGNED]
    if wrong:
        return f"a width of {wrong[0]} is no multiple of {_ALIGNED}"
    if rows_RC.is_cuda and torch.cuda.get_device_capability(rows_RC.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return ""


def by_expert(rows_RC: Tensor, sizes: Sequence[int], weights: Weights, activation: Activation) -> Tensor:
    """A product each, of `sizes` rows, which the host knows."""
    parts = rows_RC.split(list(sizes))
    ups, downs = (
        weights.up_ECF.unbind(),
        weights.down_EFC.unbind(),
    )  # unbound, gradients are stacked once, not added E times
    gates = [None] * len(ups) if weights.gate_ECF is None else weights.gate_ECF.unbind()
    done = [
        _inner(part @ up, None if gate is None else part @ gate, activation) @ down
        for part, up, gate, down in zip(parts, ups, gates, downs, strict=True)
    ]
    return torch.cat(done)


def all_at_once(rows_RC: Tensor, counts_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """Grouped products; the host need not know `counts_E`.

    Each expert's rows begin at a multiple of 16 bytes in every layout, and no group is empty: rows of zeros are put between,
    which neither change a result nor a gradient.
    """
    filled_E = counts_E.clamp_min(1).add(_ALIGNED - 1).div(_ALIGNED, rounding_mode="floor") * _ALIGNED
    ends_E = filled_E.cumsum(0)
    num = len(rows_RC)
    of_R = torch.arange(len(counts_E), device=rows_RC.device).repeat_interleave(counts_E, output_size=num)
    shift_E = (ends_E - filled_E) - (counts_E.cumsum(0) - counts_E)
    place_R = torch.arange(num, device=rows_RC.device) + shift_E[of_R]
    wide = rows_RC.new_zeros(num + _ALIGNED * len(counts_E), rows_RC.shape[1]).index_copy(0, place_R, rows_RC)
    offs = ends_E.to(torch.int32)
    up = F.grouped_mm(wide, weights.up_ECF, offs=offs)
    gate = None if weights.gate_ECF is None else F.grouped_mm(wide, weights.gate_ECF, offs=offs)
    down = F.grouped_mm(_inner(up, gate, activation), weights.down_EFC, offs=offs)
    return down.index_select(0, place_R)


def _inner(up: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    return activation(up) if gate is None else activation(gate) * up
