"""Weights of linear layers that are not trained, held in 16 bits where autocast would round them to that in each call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError

_DTYPES = (torch.bfloat16, torch.float16)


class FrozenLinear(nn.Linear):
    """A linear layer whose weights are not trained, and lie in memory in 16 bits; in a state dict they have float32.

    At its first call with weights that are trained it is an `nn.Linear` of float32 again: in 16 bits small updates would be lost.
    """

    def forward(self, input: Tensor) -> Tensor:
        """What the layer returned before under autocast; elsewhere the same with its weights rounded."""
        return F.linear(input, *self.operands_for(input))

    def operands_for(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the dtype in which such inputs are multiplied."""
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            _thaw(self)
            return self.weight, self.bias
        kind = input.device.type
        is_cast = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if is_cast else input.dtype
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "bias"):
            if destination.get(prefix + name) is not None:
                destination[prefix + name] = destination[prefix + name].float()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _thaw(module: nn.Linear) -> None:
    """Make it an `nn.Linear` of float32 before its first gradient, so that no optimizer has seen the weights in 16 bits."""
    module.__class__ = nn.Linear
    _cast(module, torch.float32)
    warnings.warn(
        "weights that hold_frozen_weights put into 16 bits are trained now: they are float32 again, rounded as they were. "
        "Call it once all is frozen that stays so, to keep their digits",
        stacklevel=2,
    )


def hold_frozen_weights(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """Hold the frozen weights of a model's linear layers in 16 bits, in place: half the memory, and no cast in each call.

    Those are weights without `requires_grad` (of a model that is fine-tuned by adapters, or of a teacher), in float32, of layers
    that are `nn.Linear` itself; weights that are split over ranks stay. Under autocast to `dtype` results and gradients have the
    same bits as before, since autocast rounds these weights in each call. Elsewhere they are used rounded. What the state dict
    has of them is in float32, rounded. Layers that are trained later are float32 again from their next call on, with a warning.
    Call it when all is frozen that stays so, on the device, before the model is compiled.

    Returns:
        A function that puts float32 in their place; rounded they stay.

    Raises:
        UsageError: `dtype` is neither bfloat16 nor float16.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype} is neither torch.bfloat16 nor torch.float16")
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = [module for module in model.modules() if _is_frozen(module, uses)]
    for module in found:
        module.__class__ = FrozenLinear
        _cast(module, dtype)

    def undo() -> None:
        for module in found:
            module.__class__ = nn.Linear
            _cast(module, torch.float32)

    return undo


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = parameter.data.to(dtype)


def _is_frozen(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether it is a plain linear layer, all of float32, that is not trained and shares its weights with no other module."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    is_plain = all(type(p.data) is Tensor for p in own)  # and no part of a weight that lies on several ranks
    return is_plain and all(not p.requires_grad and p.dtype == torch.float32 and uses[id(p)] == 1 for p in own)
