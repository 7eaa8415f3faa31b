"""Convolutions from or to few channels, as from the colours of an image, with zeros beside them up to eight."""

# B batch, C channels of the input, D of the result, H height, W width

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.training.layer_classes import is_plain_convolution, with_class

UNIT: Final = 8
"""Channels of which the matrix units' kernels in 16 bits take a multiple: 16 bytes (cuDNN, developer guide)."""


class PaddedConvolution(nn.Conv2d):
    """A convolution of fewer than eight channels computed with eight; state dict and parameters are those of `nn.Conv2d`."""

    unit: int = UNIT

    def forward(self, input: Tensor) -> Tensor:
        """(B, D, H, W) of (B, C, H, W)."""
        if input.dim() != 4:
            return super().forward(input)
        missing, surplus = padding(self.in_channels, self.unit), padding(self.out_channels, self.unit)
        if missing:
            input = F.pad(input, (0, 0, 0, 0, 0, missing))
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, missing, 0, surplus))
        bias = self.bias if self.bias is None else F.pad(self.bias, (0, surplus))
        result: Tensor = self._conv_forward(input, weight, bias)
        return result[:, : self.out_channels].clone() if surplus else result


def padding(channels: int, unit: int = UNIT) -> int:
    """How many channels of zeros there are beside so many."""
    return max(0, unit - channels)


def pad_few_channels(model: nn.Module) -> Callable[[], None]:
    """Have the two-dimensional convolutions of a model that read or return fewer than eight channels computed with eight.

    In 16 bits a GPU's matrix units take channels by the eight. For three, as colours have, cuDNN falls back to kernels that take
    many times what their bytes need: in a diffusion U-Net's step on an H200 the first convolution, of 7 x 7 from 3 to 64 channels
    at 128 x 128 pixels, took 270 us where bytes and FLOP need 16 (bench/results/2026-12-01-h200, best_earlier/account_unet_plan).
    Zeros add nothing to the sums. Layers of classes derived from `nn.Conv2d`, and those of several groups, are left as they are.
    Call it before the model is compiled.

    Returns:
        A function that puts back what was there before.
    """
    return with_class([module for module in model.modules() if _has_few(module)], PaddedConvolution)


def _has_few(module: nn.Module) -> bool:
    return is_plain_convolution(module) and min(module.in_channels, module.out_channels) < UNIT
