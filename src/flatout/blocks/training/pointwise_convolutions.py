"""Convolutions of single pixels as matrix products: the same sums, by the kernels for products, forward and backward."""

# B batch, C channels of the input, D of the result, H height, W width

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ONE = (1, 1)


class PointwiseConvolution(nn.Conv2d):
    """A convolution of 1 x 1 with stride 1 as a matrix product; state dict and parameters are those of `nn.Conv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, D, H, W) of (B, C, H, W); channels lie last where those of the input or of the weights do, as in a convolution."""
        if input.dim() != 4:
            return super().forward(input)
        weight_DC = self.weight.flatten(1)
        if input.is_contiguous(memory_format=torch.channels_last) or _channels_lie_last(self.weight):
            return F.linear(input.permute(0, 2, 3, 1), weight_DC, self.bias).permute(0, 3, 1, 2)
        result: Tensor = torch.matmul(weight_DC, input.flatten(2))
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)[:, None]
        return result.view(*result.shape[:2], *input.shape[2:])


def _channels_lie_last(weight_DC11: Tensor) -> bool:
    """Whether weights of 1 x 1 were laid out channels last, which their strides alone say: (C, 1, C, C), not (C, 1, 1, 1)."""
    return weight_DC11.stride(1) == 1 and weight_DC11.stride(3) == weight_DC11.shape[1] > 1


def pointwise_convolutions_as_products(model: nn.Module) -> Callable[[], None]:
    """Have the 1 x 1 convolutions of a model, of stride 1 and one group, computed as matrix products, in place.

    cuDNN's kernels for such convolutions, those of gradients above all, take several times as long on GPUs where channels are
    few and pixels many: in a diffusion U-Net of 64 channels at 128 x 128 pixels the gradients of one from 64 to 384 channels took
    1.6 ms in bfloat16 on an H200, and reading and writing its arrays 0.11 ms (bench/results/2026-11-30-h200, account_unet_plan).
    Layers of classes derived from `nn.Conv2d` are left as they are. Call it before the model is compiled.

    Returns:
        A function that puts back what was there before.
    """
    found = [module for module in model.modules() if _is_pointwise(module)]
    for module in found:
        module.__class__ = PointwiseConvolution

    def undo() -> None:
        for module in found:
            module.__class__ = nn.Conv2d

    return undo


def _is_pointwise(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or "forward" in vars(module):
        return False
    return (module.kernel_size, module.stride, module.groups) == (_ONE, _ONE, 1) and module.padding in ((0, 0), "valid")
