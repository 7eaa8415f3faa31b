"""Training with the rounding in place, for what a model loses when it is rounded afterwards.

While it trains, weights are float32 and are rounded in each forward pass, and gradients go through as if they were not (Bengio et
al., arXiv:1308.3432). torchao has the same for other grids: its int8 has steps of the largest / 127.5, so that a model trained on
it and run by flatout's kernel is rounded twice, and it has no symmetric rows of activations. Here what was trained is what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import affine
from flatout.shrink.quantise.layers import GROUP, Bits, weight_grid
from flatout.shrink.quantise.quantised_model import Quantised, layer_at, named, replace_layer, replaced
from flatout.shrink.quantise.schemes import scheme_of

_BITS: Final[dict[str, Bits]] = {"int8": 8, "int4": 4}
_KNOWN: Final = ("int8", "int8-dynamic", "int4", "int4-dynamic")


class FakeQuantisedLinear(nn.Linear):
    """A Linear that computes with rounded weights, and rounded rows of activations where `is_dynamic`; parameters are floats."""

    def __init__(self, layer: nn.Linear, *, bits: Bits, is_dynamic: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._bits, self._is_dynamic = bits, is_dynamic
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs [..., K], as nn.Linear has them."""
        if self._is_dynamic:
            steps = (x.detach().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
            x = _straight_through(x, affine.Affine(steps, torch.zeros_like(steps), -127, 127).fake_quantise(x.detach()))
        return F.linear(x, _straight_through(self.weight, self.fake_quantised_weight()), self.bias)

    def fake_quantised_weight(self) -> Tensor:
        """The weights as they are computed with."""
        weight = self.weight.detach()
        by = weight_grid(weight, bits=self._bits)
        if self._bits == 8:
            return by.fake_quantise(weight)
        return by.fake_quantise(affine.grouped(weight, group=GROUP)).flatten(1)[:, : self.in_features]

    def plain(self) -> nn.Linear:
        """A Linear with these parameters."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


@dataclass(eq=False)
class Prepared:
    """A copy of a model that trains with rounded weights: train `module` as ever, then `convert()`.

    Make the optimizer of `module.parameters()`. The state dict has the model's own names.
    """

    module: nn.Module
    schemes: Mapping[str, str]
    unchanged: Mapping[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def float_model(self) -> nn.Module:
        """A copy with the trained weights and plain layers again, in eval mode."""
        module = copy.deepcopy(self.module)
        for path in self.schemes:
            layer = layer_at(module, path)
            assert isinstance(layer, FakeQuantisedLinear)
            module = replace_layer(module, path, layer.plain())
        return module.eval()

    def convert(self) -> Quantised:
        """The trained model with few-bit layers; it must be on a CPU, where flatout's kernel is."""
        return replaced(
            self.float_model(), {path: scheme_of(name) for path, name in self.schemes.items()}, unchanged=self.unchanged
        )


def prepare_qat(model: nn.Module, scheme: str | Mapping[str, str] = "int8") -> Prepared:
    """A copy whose Linear layers round as `scheme` does (patterns as in `quantise`): int8 and int4, with or without "-dynamic".

    UsageError for another scheme, and when no layer is left.
    """
    wanted, unchanged = named(model, {"*": scheme} if isinstance(scheme, str) else scheme)
    for path, s in wanted.items():
        if s.name not in _KNOWN:
            raise UsageError(f"layer '{path}': '{s.name}' is none of {', '.join(_KNOWN)}, which can be trained for")
    others = [path for path in wanted if not isinstance(layer_at(model, path), nn.Linear)]
    unchanged = {**unchanged, **dict.fromkeys(others, "only Linear is trained with rounding")}
    schemes = {path: s for path, s in wanted.items() if path not in others}
    if not schemes:
        raise UsageError(f"no Linear of {type(model).__name__} can be trained for {scheme}: {unchanged}")
    module = copy.deepcopy(model)
    for path, s in schemes.items():
        layer, bits = cast(nn.Linear, layer_at(module, path)), _BITS[s.name.removesuffix("-dynamic")]
        fake = FakeQuantisedLinear(layer, bits=bits, is_dynamic=s.name.endswith("-dynamic"))
        module = replace_layer(module, path, fake)
    return Prepared(module, {path: s.name for path, s in schemes.items()}, unchanged)


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers, with the gradient of `x`."""
    return x + (rounded - x).detach()
