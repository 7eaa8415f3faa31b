"""Training with the rounding in place, for what a model loses when it is rounded afterwards.

While it trains, weights are float32 and are rounded in each forward pass, and gradients go through as if they were not (Bengio et
al., arXiv:1308.3432). torchao has the same for other grids: its int8 has steps of the largest / 127.5, so that a model trained on
it and run by flatout's kernel is rounded twice, and it has no symmetric rows of activations. Here what was trained is what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.compression.quantising import affine
from flatout.compression.quantising.layers import GROUP, Bits, grid
from flatout.compression.quantising.quantised import Quantised, named, replaced
from flatout.compression.quantising.schemes import Scheme, scheme_of
from flatout.compression.quantising.sites import owner, place
from flatout.errors import UsageError

_KNOWN: Final = ("int8", "int8-dynamic", "int4", "int4-dynamic")


class RoundedLinear(nn.Linear):
    """A Linear that computes with rounded weights, and rounded rows of activations where `is_dynamic`; parameters are floats."""

    def __init__(self, layer: nn.Linear, *, bits: Bits, is_dynamic: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._bits, self._is_dynamic = bits, is_dynamic
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        if self._is_dynamic:
            steps = (x.detach().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
            x = _through(x, affine.Affine(steps, torch.zeros_like(steps), -127, 127).rounded(x.detach()))
        return F.linear(x, _through(self.weight, self.rounded()), self.bias)

    def rounded(self) -> Tensor:
        """The weights as they are computed with."""
        weight = self.weight.detach()
        by = grid(weight, bits=self._bits)
        if self._bits == 8:
            return by.rounded(weight)
        return by.rounded(affine.grouped(weight, group=GROUP)).flatten(1)[:, : self.in_features]

    def plain(self) -> nn.Linear:
        """A Linear with these parameters."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


class Prepared:
    """A copy of a model that trains with rounded weights: train `module` as ever, then `convert()`.

    Make the optimizer of `module.parameters()`. The state dict has the model's own names.
    """

    def __init__(self, module: nn.Module, schemes: Mapping[str, str], *, left: Mapping[str, str]) -> None:
        self.module, self.schemes, self.left = module, dict(schemes), dict(left)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def floats(self) -> nn.Module:
        """A copy with the trained weights and plain layers again, in eval mode."""
        module = copy.deepcopy(self.module)
        for path in self.schemes:
            layer = owner(module, path)
            assert isinstance(layer, RoundedLinear)
            module = place(module, path, layer.plain())
        return module.eval()

    def convert(self) -> Quantised:
        """The trained model with few-bit layers; it must be on a CPU, where flatout's kernel is."""
        return replaced(self.floats(), {path: scheme_of(name) for path, name in self.schemes.items()}, left=self.left)


def prepare_qat(model: nn.Module, scheme: str | Mapping[str, str] = "int8") -> Prepared:
    """A copy whose Linear layers round as `scheme` does (patterns as in `quantise`): int8 and int4, with or without "-dynamic".

    UsageError for another scheme, and when no layer is left.
    """
    wanted, left = named(model, {"*": scheme} if isinstance(scheme, str) else scheme)
    for path, s in wanted.items():
        if s.name not in _KNOWN:
            raise UsageError(f"layer '{path}': '{s.name}' is none of {', '.join(_KNOWN)}, which can be trained for")
    others = [path for path in wanted if not isinstance(owner(model, path), nn.Linear)]
    left = {**left, **dict.fromkeys(others, "only Linear is trained with rounding")}
    schemes = {path: s for path, s in wanted.items() if path not in others}
    if not schemes:
        raise UsageError(f"no Linear of {type(model).__name__} can be trained for {scheme}: {left}")
    module = copy.deepcopy(model)
    for path, s in schemes.items():
        module = place(module, path, _prepared(owner(module, path), s))
    return Prepared(module, {path: s.name for path, s in schemes.items()}, left=left)


def _prepared(layer: nn.Module, scheme: Scheme) -> RoundedLinear:
    assert isinstance(layer, nn.Linear)
    return RoundedLinear(
        layer, bits=4 if scheme.name.startswith("int4") else 8, is_dynamic=scheme.name.endswith("-dynamic")
    )


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers, with the gradient of `x`."""
    return x + (rounded - x).detach()
