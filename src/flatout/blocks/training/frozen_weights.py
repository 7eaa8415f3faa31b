"""Weights of linear layers that are not trained, held in 16 bits where autocast would round them to that in each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError

_DTYPES = (torch.bfloat16, torch.float16)


class FrozenLinear(nn.Linear):
    """A linear layer whose weights are not trained, and lie in memory in 16 bits; in a state dict they have float32."""

    def forward(self, input: Tensor) -> Tensor:
        """What the layer returned before under autocast; elsewhere the same with its weights rounded."""
        return F.linear(input, self.weight_for(input), self.bias_for(input))

    def weight_for(self, input: Tensor) -> Tensor:
        """The weight in the dtype in which such inputs are multiplied.

        Raises UsageError where the weight is trained by now: in 16 bits small updates would be lost.
        """
        if self.weight.requires_grad:
            raise UsageError(
                "a weight that hold_frozen_weights put into 16 bits is trained now, where small updates would be lost: "
                "call it once all is frozen that stays so, or call what it returned before more is trained"
            )
        return self.weight.to(_wanted(input))

    def bias_for(self, input: Tensor) -> Tensor | None:
        """The bias in that dtype, where there is one."""
        return None if self.bias is None else self.bias.to(_wanted(input))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "bias"):
            if destination.get(prefix + name) is not None:
                destination[prefix + name] = destination[prefix + name].float()


def _wanted(input: Tensor) -> torch.dtype:
    kind = input.device.type
    is_cast = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else input.dtype


def hold_frozen_weights(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """Hold the frozen weights of a model's linear layers in 16 bits, in place: half the memory, and no cast in each call.

    Those are weights without `requires_grad` (of a model that is fine-tuned by adapters, or of a teacher), in float32, of layers
    that are `nn.Linear` itself. Under autocast to `dtype` results and gradients have the same bits as before, since autocast
    rounds these weights in each call. Elsewhere they are used rounded. What the state dict has of them is in float32, rounded.
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
    return all(not p.requires_grad and p.dtype == torch.float32 and uses[id(p)] == 1 for p in own)
