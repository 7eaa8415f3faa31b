"""Layers with a low-rank pair: the layer keeps its identity, weights and names, and changes its class while it is adapted.

A linear layer or convolution computes the pair beside its own product, so that no gradient of the whole weight is made.
Attention, recurrent and transposed layers hand their weights to one fused function; there the sum W + s B A is formed in each
call, at the price of the whole weight's gradient. Reading an adapted `weight` gives that sum, too: fused fast paths of torch
that never call the layer see what it computes with.

Legend: R rank, O rows of the weight (outputs), I its columns (inputs times kernel).
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

SLOTS: Final = "low_rank"
"""The name of the child that holds an adapted layer's pairs, by name of adapter."""


class Slots(nn.ModuleDict):
    """What a module carries of each adapter, by its name; `active` says whose is used."""

    def __init__(self) -> None:
        super().__init__()
        self.active: str | None = None
        self.plain_class: type[nn.Module] = nn.Module

    def part(self) -> nn.Module | None:
        active = self.active
        return self[active] if active is not None and active in self else None


class LowRank(nn.Module):
    """A pair for one weight, of the weight's dtype and device; B starts as zero, the length as that of the weight's rows.

    `a` [R, ...] and `b` [O, R, ...] have the shapes in which PEFT keeps them.
    """

    def __init__(self, weight: Tensor, rank: int, *, scale: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        flat = weight.flatten(1)
        bound = 1 / math.sqrt(flat.shape[1])  # as nn.Linear starts: Kaiming uniform with a = sqrt(5)
        drawn = torch.rand(rank, flat.shape[1], generator=generator) * (2 * bound) - bound
        self.a = nn.Parameter(drawn.to(weight).view(rank, *weight.shape[1:]))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], rank, *(1,) * (weight.dim() - 2)))
        self.length: nn.Parameter | None = None
        self.scale, self.dropout = scale, dropout

    def give_length(self, weight: Tensor) -> None:
        """From here on DoRA: the rows of the sum get a learned length, at first the weight's own."""
        self.length = nn.Parameter(self.norms(weight))

    def product(self) -> Tensor:
        """B A [O, I]."""
        product: Tensor = self.b.flatten(1) @ self.a.flatten(1)
        return product

    def norms(self, weight: Tensor) -> Tensor:
        """Lengths [O] of the rows of W + s B A, without forming it; no gradient passes (arXiv 2402.09353, section 4.3)."""
        with torch.no_grad():
            exact = torch.promote_types(weight.dtype, torch.float32)  # squares leave the range of float16
            w_OI, a_RI, b_OR = weight.flatten(1), self.a.flatten(1), self.b.flatten(1) * self.scale
            inner_OR = 2 * (w_OI @ a_RI.t()) + b_OR @ (a_RI @ a_RI.t())
            squares_O = torch.linalg.vector_norm(w_OI, dim=1, dtype=exact).square() + (inner_OR * b_OR).sum(
                1, dtype=exact
            )
            # Rounding must not turn a row of zeros negative, and zero over zero must stay 1.
            lengths_O: Tensor = squares_O.clamp(min=torch.finfo(torch.float16).tiny ** 2).sqrt().to(weight.dtype)
            return lengths_O

    def stretch(self, weight: Tensor) -> Tensor:
        """Learned length over length [O]: exactly 1 at the start."""
        assert self.length is not None
        return self.length / self.norms(weight)

    def formed(self, weight: Tensor) -> Tensor:
        """The weight that the layer computes with."""
        total = weight + (self.product() * self.scale).view_as(weight)
        if self.length is None:
            return total
        return total * self.stretch(weight).view(-1, *(1,) * (weight.dim() - 1))

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[0]}, scale={self.scale}" + (", is_dora=True" if self.length is not None else "")


def pair_of(module: nn.Module, name: str = "weight") -> LowRank | None:
    """The active pair of a module's weight."""
    part = cast(Slots, module._modules[SLOTS]).part()
    return cast(LowRank, part[name]) if isinstance(part, nn.ModuleDict) and name in part else None


def _formed(module: nn.Module, name: str) -> Tensor:
    weight, pair = cast(Tensor, module._parameters[name]), pair_of(module, name)
    return weight if pair is None else pair.formed(weight)


def _beside(y: Tensor, low: Tensor, pair: LowRank, layer: nn.Linear | nn.Conv1d | nn.Conv2d, dim: int) -> Tensor:
    """The layer's own result and the pair's, joined; without a length their sum."""
    y = y + low
    if pair.length is None:
        return y
    shape = [1] * y.dim()
    shape[dim] = -1
    more = (pair.stretch(cast(Tensor, layer._parameters["weight"])) - 1).view(shape)
    product = y if layer.bias is None else y - layer.bias.view(shape)
    return torch.addcmul(y, product, more)  # the bias has no length


class AdaptedLinear(nn.Linear):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        y, pair = F.linear(x, cast(Tensor, self._parameters["weight"]), self.bias), pair_of(self)
        if pair is None:
            return y
        if pair.dropout:
            x = F.dropout(x, pair.dropout, self.training)
        return _beside(y, F.linear(F.linear(x, pair.a) * pair.scale, pair.b), pair, self, -1)


class AdaptedConv1d(nn.Conv1d):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x, cast(Tensor, self._parameters["weight"]), self.bias)
        pair = pair_of(self)
        if pair is None:
            return y
        if pair.dropout:
            x = F.dropout(x, pair.dropout, self.training)
        low = F.conv1d(cast(Tensor, self._conv_forward(x, pair.a, None)) * pair.scale, pair.b)
        return _beside(y, low, pair, self, -2)


class AdaptedConv2d(nn.Conv2d):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x, cast(Tensor, self._parameters["weight"]), self.bias)
        pair = pair_of(self)
        if pair is None:
            return y
        if pair.dropout:
            x = F.dropout(x, pair.dropout, self.training)
        low = F.conv2d(cast(Tensor, self._conv_forward(x, pair.a, None)) * pair.scale, pair.b)
        return _beside(y, low, pair, self, -3)


class AdaptedConvTranspose1d(nn.ConvTranspose1d):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight")


class AdaptedConvTranspose2d(nn.ConvTranspose2d):
    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight")


class AdaptedMultiheadAttention(nn.MultiheadAttention):
    """Its `out_proj` is adapted as the linear layer that it is: attention reads that layer's weight."""

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _formed(self, "in_proj_weight") if self._parameters["in_proj_weight"] is not None else None

    @property
    def q_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _formed(self, "q_proj_weight") if self._parameters["q_proj_weight"] is not None else None

    @property
    def k_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _formed(self, "k_proj_weight") if self._parameters["k_proj_weight"] is not None else None

    @property
    def v_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        return _formed(self, "v_proj_weight") if self._parameters["v_proj_weight"] is not None else None


class AdaptedGRUCell(nn.GRUCell):
    @property
    def weight_ih(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight_ih")

    @property
    def weight_hh(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight_hh")


class AdaptedLSTMCell(nn.LSTMCell):
    @property
    def weight_ih(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight_ih")

    @property
    def weight_hh(self) -> Tensor:  # type: ignore[override]
        return _formed(self, "weight_hh")


def _recurrent(layer: nn.RNNBase, forward: Any, inputs: Any, state: Any) -> Any:
    """The layer's own forward with formed weights in the list that it hands to its kernel."""
    names = [name for name in layer._flat_weights_names if pair_of(layer, name) is not None]
    if not names:
        return forward(inputs, state)
    layer._update_flat_weights()  # before the list is replaced: forward would make it anew
    own = layer._flat_weights
    layer.__dict__["_flat_weights"] = [
        _formed(layer, n) if n in names else w for n, w in zip(layer._flat_weights_names, own, strict=True)
    ]
    try:
        return forward(inputs, state)
    finally:
        layer.__dict__["_flat_weights"] = own


class AdaptedGRU(nn.GRU):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return _recurrent(self, super().forward, input, hx)


class AdaptedLSTM(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return _recurrent(self, super().forward, input, hx)


ADAPTED: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: AdaptedLinear,
    NonDynamicallyQuantizableLinear: AdaptedLinear,
    nn.Conv1d: AdaptedConv1d,
    nn.Conv2d: AdaptedConv2d,
    nn.ConvTranspose1d: AdaptedConvTranspose1d,
    nn.ConvTranspose2d: AdaptedConvTranspose2d,
    nn.MultiheadAttention: AdaptedMultiheadAttention,
    nn.GRU: AdaptedGRU,
    nn.LSTM: AdaptedLSTM,
    nn.GRUCell: AdaptedGRUCell,
    nn.LSTMCell: AdaptedLSTMCell,
}
"""By the plain layer's exact class."""
PLAIN: Final = {adapted: plain for plain, adapted in reversed(ADAPTED.items())}
BESIDE: Final = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers that compute the pair beside their own product."""
