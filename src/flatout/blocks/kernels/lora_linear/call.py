"""`flatout.lora_linear`: the public function, which checks its arguments and selects a kernel.

N rows, I inputs, O outputs, R rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.blocks.kernels.selection import kernel_operator
from flatout.blocks.training.frozen_weights import FrozenLinear
from flatout.core.errors import UsageError

_lora_linear = kernel_operator(
    "lora_linear",
    "(Tensor x, Tensor weight, Tensor down, Tensor up, Tensor? bias, *, float scale, str? kernel) -> Tensor",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def lora_linear(
    x: Tensor,
    layer: nn.Linear | Tensor,
    down: nn.Linear | Tensor,
    up: nn.Linear | Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    kernel: str | None = None,
) -> Tensor:
    """`layer(x) + scale * up(down(x))`, where `down` and `up` are a low-rank adapter (LoRA, arXiv 2106.09685), by one product.

    `layer`, `down` and `up` are `nn.Linear` or their weights, (O, I), (R, I) and (O, R); `x` is (..., I), the result (..., O).
    Adapters have no bias; `bias` (O,) is that of a `layer` passed as a weight.

    For many rows the adapter is added to the weight, `W + scale * up @ down`, and `x` is multiplied by that: no product of the
    adapter's own is written in the size of the result and added to it, nor in the backward pass one in the size of `x`. The
    gradients of `down` and `up` are made from narrow products, without the whole weight's gradient, which is made only where
    the weight is trained. In 16 bits the sum is rounded to 16 bits, as the weight itself is under autocast. For few rows, where
    passes over the weight would cost more, adapter and layer are multiplied apart.

    Products have the dtype of the inputs, under autocast its dtype. `kernel` is the id of the implementation, by default the
    first that can run: `lora_linear.merged`, `.reference`.

    Raises UsageError for shapes that do not fit, for a module that is more or other than an `nn.Linear` (a subclass, one with
    hooks or a parametrization), for an adapter with a bias, and for a kernel that cannot run them.

    >>> x, weight = torch.ones(1, 3), torch.zeros(2, 3)
    >>> lora_linear(x, weight, torch.ones(1, 3), torch.ones(2, 1), scale=2.0)
    tensor([[6., 6.]])
    """
    weight, own_bias = _weight(layer, "layer", x)
    (down, down_bias), (up, up_bias) = _weight(down, "down", x), _weight(up, "up", x)
    if down_bias is not None or up_bias is not None:
        raise UsageError("an adapter has a bias, which this product leaves out; give one without (bias=False)")
    if own_bias is not None and bias is not None:
        raise UsageError("the layer has a bias of its own; leave out `bias`, or pass the layer's weight")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise UsageError(f"scale is {type(scale).__name__}; give a number, float(scale) where it is not trained")
    bias = own_bias if bias is None else bias
    _check(x, weight, down, up, bias)
    result: Tensor = _lora_linear(x, weight, down, up, bias, scale=float(scale), kernel=kernel)
    return result


def _weight(layer: nn.Linear | Tensor, name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of what is one product and nothing else."""
    if isinstance(layer, Tensor):
        return layer, None
    if type(layer) not in (nn.Linear, FrozenLinear):
        raise UsageError(f"{name} is {type(layer).__name__}; give an nn.Linear, or the weight of one")
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        raise UsageError(f"{name} has hooks, which this product would not run; remove them, or give its weight")
    if isinstance(layer, FrozenLinear):
        return layer.operands_for(x)
    return layer.weight, layer.bias


def _check(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, bias: Tensor | None) -> None:
    shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("layer", weight), ("down", down), ("up", up)))
    if any(t.dim() != 2 for t in (weight, down, up)):
        raise UsageError(f"{shapes} are not all matrices; give (O, I), (R, I) and (O, R), as nn.Linear holds them")
    if down.shape[1] != weight.shape[1] or up.shape != (weight.shape[0], down.shape[0]):
        raise UsageError(
            f"{shapes} are no layer and its adapter; give (O, I), (R, I) and (O, R), as nn.Linear holds them"
        )
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"x {tuple(x.shape)} does not end in the {weight.shape[1]} inputs of layer {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias {tuple(bias.shape)} is not one number for each of {weight.shape[0]} outputs")
    tensors = [x, weight, down, up, *([bias] if bias is not None else [])]
    if not all(t.is_floating_point() for t in tensors):
        raise UsageError(
            f"x, weights and bias are {', '.join(str(t.dtype) for t in tensors)}; give floating-point numbers"
        )
    if len({t.dtype for t in tensors}) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise UsageError(
            f"x, weights and bias are {', '.join(str(t.dtype) for t in tensors)}; products need one dtype: "
            "cast, or run under torch.autocast"
        )
