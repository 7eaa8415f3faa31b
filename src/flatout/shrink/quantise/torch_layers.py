"""Layers with fewer bits by kernels of torch and of torchao.

Legend: N outputs, K inputs, R rows.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from types import ModuleType
from typing import Final, Literal

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise.affine import Affine

_FP8_MOST: Final = 448.0
"""The largest number of float8_e4m3fn."""
_FP8_DEVICES: Final = (8, 9)
"""Compute capability from which on a GPU multiplies float8 (Ada, then Hopper): NVIDIA, CUDA programming guide."""


TorchaoFormat = Literal["int8", "int8-dynamic", "int4"]


def layer_weights(layer: nn.Module) -> list[Tensor]:
    """Matrices of a layer, those of a recurrent layer all."""
    return [p for name, p in layer.named_parameters() if "weight" in name]


class Bf16(nn.Module):
    """The layer with weights and inputs in bfloat16; what comes out has the inputs' dtype."""

    def __init__(self, layer: nn.Module, inputs: Affine | None = None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, in the dtype of the inputs."""
        y: Tensor = self.layer(x.bfloat16())
        return y.to(x.dtype)


def refuses_bf16(layer: nn.Module) -> str | None:
    """Recurrent layers hand states about in their own dtype."""
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return "this scheme is for Linear and convolutions"
    return "it is in 16 bits already" if layer.weight.element_size() < 4 else None


class Fp8(nn.Module):
    """Linear with float8 e4m3 weights, a scale an output, and activations, a scale a row; products are in bfloat16."""

    weight_NK: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module, inputs: Affine | None = None) -> None:
        super().__init__()
        assert isinstance(layer, nn.Linear)
        weight, scales = _to_fp8(layer.weight.detach())
        self.register_buffer("weight_NK", weight)
        self.register_buffer("scales", scales.t().contiguous())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs [..., K], as nn.Linear has them."""
        rows, steps = _to_fp8(x.reshape(-1, x.shape[-1]))
        y = torch._scaled_mm(rows, self.weight_NK.t(), scale_a=steps, scale_b=self.scales, out_dtype=torch.bfloat16).to(
            x.dtype
        )
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


def _to_fp8(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in float8 and their rows' scales [R, 1] in float32."""
    step = (x_RK.abs().amax(1, keepdim=True).float() / _FP8_MOST).clamp(min=1e-30)
    return (x_RK.float() / step).to(torch.float8_e4m3fn), step


def refuses_fp8(layer: nn.Module) -> str | None:
    """Devices and sizes that its kernel does not take."""
    if not isinstance(layer, nn.Linear):
        return "this scheme is for Linear"
    if not layer.weight.is_cuda:
        return f"float8 is multiplied on GPUs alone, the layer is on {layer.weight.device}"
    has = torch.cuda.get_device_capability(layer.weight.device)
    if has < _FP8_DEVICES:
        return f"compute capability {has[0]}.{has[1]} has no float8; {_FP8_DEVICES[0]}.{_FP8_DEVICES[1]} and later have"
    if layer.in_features % 16 or layer.out_features % 16:
        return f"{layer.in_features} x {layer.out_features}: float8 products take multiples of 16"
    return None


# ------------------------------------------------------------------------------------------------------------------ torchao


def torchao_quantization() -> ModuleType:
    """`torchao.quantization`. UsageError when it is not installed.

    torchao adds a filter of warnings when it is imported; that is put back. That its own C++ does not load beside this torch it
    writes to the log by itself: what is used here does not need it.
    """
    try:
        with warnings.catch_warnings():
            return importlib.import_module("torchao.quantization")
    except ImportError as e:
        raise UsageError("torchao is not installed; pip install 'flatout[quantise]'") from e


class Torchao(nn.Module):
    """A Linear whose weight is one of torchao's tensors; int4 is called in bfloat16, which its kernel wants."""

    def __init__(
        self, layer: nn.Module, inputs: Affine | None = None, *, format: TorchaoFormat, is_compiled: bool = False
    ) -> None:
        super().__init__()
        ao, self._is_16 = torchao_quantization(), format == "int4"
        # set_inductor_config=False: Inductor's settings, which are global, are left alone.
        if format == "int4":
            packing = {"int4_packing_format": "tile_packed_to_4d"} if next(layer.parameters()).is_cuda else {}
            config = ao.Int4WeightOnlyConfig(group_size=64, set_inductor_config=False, **packing)
        elif format == "int8":
            config = ao.Int8WeightOnlyConfig(set_inductor_config=False)
        else:
            config = ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        inner = nn.Sequential(copy.deepcopy(layer))
        self.inner = inner.bfloat16() if self._is_16 else inner
        ao.quantize_(self.inner, config)
        self._run = (
            torch.compile(self.inner) if is_compiled else self.inner,
        )  # in a tuple: no second name in the state

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, in the dtype of the inputs."""
        y: Tensor = self._run[0](x.bfloat16() if self._is_16 else x)
        return y.to(x.dtype)


def refuses_torchao(layer: nn.Module, *, format: TorchaoFormat) -> str | None:
    """Layers and devices that it has no kernel for."""
    if not isinstance(layer, nn.Linear):
        return "this scheme is for Linear"
    if format == "int4" and not layer.weight.is_cuda:
        return "torchao's int4 has no kernel for a CPU"
    if format == "int4" and layer.in_features % 64:
        return f"{layer.in_features} inputs are not a multiple of the group, 64"
    try:
        torchao_quantization()
    except UsageError as e:
        return str(e)
    return None
