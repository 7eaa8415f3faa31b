"""Layers with a low-rank pair: the layer keeps its identity, weights and names, and changes its class while it is adapted.

Linear layers, by `lora_linear`, and convolutions, which compute the pair beside their own product, make no gradient of the whole
weight.
Attention, recurrent and transposed layers hand their weights to one fused function; there the sum W + s B A is formed in each
call, at the price of the whole weight's gradient. Reading an adapted `weight` gives that sum, too: fused fast paths of torch
that never call the layer see what it computes with.

Legend: R rank, O rows of the weight (outputs), I its columns (inputs times kernel).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flatout.blocks.kernels.lora_linear.call import lora_linear
from flatout.core.errors import UsageError

LOW_RANK_CHILD: Final = "low_rank"
"""The name of the child that holds an adapted layer's pairs, by name of adapter."""


class AdapterParts(nn.ModuleDict):
    """What a module carries of each adapter, by its name; `active` says whose is used."""

    def __init__(self) -> None:
        super().__init__()
        self.active: str | None = None
        self.plain_class: type[nn.Module] = nn.Module

    def part(self) -> nn.Module | None:
        active = self.active
        return self[active] if active is not None and active in self else None

    def hook(self, host: nn.Module) -> None:
        """Have the host work through these parts; a low-rank pair does so by the host's class."""


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
        """Turn the pair into DoRA: the rows of the sum get a learned length, at first the weight's own."""
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

    def magnitude_ratio(self, weight: Tensor) -> Tensor:
        """Learned length over length [O]: exactly 1 at the start."""
        assert self.length is not None
        return self.length / self.norms(weight)

    def merged_weight(self, weight: Tensor) -> Tensor:
        """The weight that the layer computes with."""
        total = weight + (self.product() * self.scale).view_as(weight)
        if self.length is None:
            return total
        return total * self.magnitude_ratio(weight).view(-1, *(1,) * (weight.dim() - 1))

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[0]}, scale={self.scale}" + (", is_dora=True" if self.length is not None else "")


def pair_of(module: nn.Module, name: str = "weight") -> LowRank | None:
    """The active pair of a module's weight."""
    part = cast(AdapterParts, module._modules[LOW_RANK_CHILD]).part()
    return cast(LowRank, part[name]) if isinstance(part, nn.ModuleDict) and name in part else None


@torch.no_grad()
def merge_weights(model: nn.Module, hosts: Sequence[str]) -> tuple[dict[str, Tensor], float]:
    """Write the pairs into the weights, summed in float64 and rounded once.

    Returns what the weights were, by name, and the largest rounding error over a weight's largest number.

    Raises UsageError, before it changes anything, where a weight is shared with another module: that would change, too.
    """
    for host in hosts:
        _check_unshared(model, host)
    replaced, worst = {}, 0.0
    for host in hosts:
        path, _, name = host.partition("/")
        module = model.get_submodule(path)
        weight, pair = cast(nn.Parameter, module._parameters[name]), pair_of(module, name)
        assert pair is not None
        replaced[f"{path}.{name}".lstrip(".")] = weight.detach().clone()
        exact = copy.deepcopy(pair).double().merged_weight(weight.double())
        weight.copy_(exact)
        error = (weight.double() - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        worst = max(worst, float(error))
    return replaced, worst


def _check_unshared(model: nn.Module, host: str) -> None:
    path, _, name = host.partition("/")
    weight = model.get_submodule(path)._parameters[name]
    at = [f"{p}.{n}" for p, m in model.named_modules() for n, w in m._parameters.items() if w is weight]
    if len(at) > 1:
        raise UsageError(
            f"the weight of '{path}' is also {' and '.join(at)}: merged, both would change; do not adapt it, or untie it"
        )


def _merged_weight(module: nn.Module, name: str) -> Tensor:
    weight, pair = cast(Tensor, module._parameters[name]), pair_of(module, name)
    return weight if pair is None else pair.merged_weight(weight)


def _merged(name: str) -> Any:
    """A weight that reads as the sum W + s B A."""
    return property(lambda module: _merged_weight(module, name))


def _merging(plain: type[nn.Module], *names: str) -> type[nn.Module]:
    """The subclass whose own forward reads these weights as sums."""
    members = {name: _merged(name) for name in names}
    return type(f"Adapted{plain.__name__}", (plain,), {"__module__": __name__, **members})


def _with_pair(
    layer: nn.Linear | nn.Conv1d | nn.Conv2d, x: Tensor, product: Callable[..., Tensor], mix: Callable[..., Tensor]
) -> Tensor:
    """The layer's own `product` and the pair's beside it, whose second half `mix` is; without a length their sum."""
    weight, pair = cast(Tensor, layer._parameters["weight"]), pair_of(layer)
    y = product(x, weight, layer.bias)
    if pair is None:
        return y
    if pair.dropout:
        x = F.dropout(x, pair.dropout, layer.training)
    y = y + mix(product(x, pair.a, None) * pair.scale, pair.b)
    if pair.length is None:
        return y
    wide = (-1, *(1,) * (weight.dim() - 2))  # the rows' dimension, and places behind it
    more = (pair.magnitude_ratio(weight) - 1).view(wide)
    return torch.addcmul(y, y if layer.bias is None else y - layer.bias.view(wide), more)  # the bias has no length


class AdaptedLinear(nn.Linear):
    weight = _merged("weight")

    def forward(self, x: Tensor) -> Tensor:
        pair = pair_of(self)
        if pair is None or pair.length is not None or (pair.dropout and self.training):
            return _with_pair(self, x, F.linear, F.linear)
        weight = cast(Tensor, self._parameters["weight"])
        return lora_linear(x, weight, pair.a, pair.b, self.bias, scale=pair.scale)


class AdaptedConv1d(nn.Conv1d):
    weight = _merged("weight")

    def forward(self, x: Tensor) -> Tensor:
        return _with_pair(self, x, self._conv_forward, F.conv1d)


class AdaptedConv2d(nn.Conv2d):
    weight = _merged("weight")

    def forward(self, x: Tensor) -> Tensor:
        return _with_pair(self, x, self._conv_forward, F.conv2d)


AdaptedConvTranspose1d = _merging(nn.ConvTranspose1d, "weight")
AdaptedConvTranspose2d = _merging(nn.ConvTranspose2d, "weight")
AdaptedGRUCell = _merging(nn.GRUCell, "weight_ih", "weight_hh")
AdaptedLSTMCell = _merging(nn.LSTMCell, "weight_ih", "weight_hh")
AdaptedMultiheadAttention = _merging(
    nn.MultiheadAttention, "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
)
"""Its `out_proj` is adapted as the linear layer that it is: attention reads that layer's weight."""


def _recurrent(layer: nn.RNNBase, forward: Any, inputs: Any, state: Any) -> Any:
    """The layer's own forward with formed weights in the list that it hands to its kernel."""
    names = [name for name in layer._flat_weights_names if pair_of(layer, name) is not None]
    if not names:
        return forward(inputs, state)
    layer._update_flat_weights()  # before the list is replaced: forward would make it anew
    own = layer._flat_weights
    layer.__dict__["_flat_weights"] = [
        _merged_weight(layer, n) if n in names else w for n, w in zip(layer._flat_weights_names, own, strict=True)
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
