"""Schemes by name: which numbers a layer's weights and activations become, and who multiplies them.

A name is the format, and after a dot whose kernel it is; without one it is flatout's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import kernel
from flatout.shrink.quantise import torch_layers as others
from flatout.shrink.quantise.affine import Affine
from flatout.shrink.quantise.layers import Bits, FewBits, FewBitsCell, FewBitsConv, FewBitsLayers, Terms

LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTMCell, nn.GRUCell, nn.LSTM, nn.GRU)
"""Types, not their subclasses, that some scheme knows."""


class Scheme(NamedTuple):
    """How a layer gets fewer bits."""

    name: str
    description: str
    refuses: Callable[[nn.Module], str | None]
    """Why a layer of LAYERS on its device cannot have it; None when it can."""
    make: Callable[[nn.Module, Affine | None], nn.Module]
    """The layer in this scheme, as a new module; the activations' transformation where `is_calibrated`."""
    is_calibrated: bool = False


def _own(name: str, description: str, *, bits: Bits, terms: Terms, is_calibrated: bool = False) -> Scheme:
    def refuses(layer: nn.Module) -> str | None:
        if isinstance(layer, nn.LSTM | nn.GRU) and layer.proj_size:
            return "its state is projected"
        if not isinstance(layer, nn.Linear) and (bits == 4 or is_calibrated):
            return "this scheme is for Linear"
        if isinstance(layer, nn.Conv1d | nn.Conv2d) and (
            layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
        ):
            return "grouped, or not padded with a number of zeros"
        weights = others.layer_weights(layer)
        if any(w.device.type != "cpu" or w.dtype is not torch.float32 for w in weights):
            return f"flatout's kernel takes float32 on a CPU, not {weights[0].dtype} on {weights[0].device}"
        most = max(w[0].numel() for w in weights)
        if most > kernel.MOST_INPUTS:
            return f"{most} inputs; sums in whole numbers hold up to {kernel.MOST_INPUTS}"
        return kernel.refusal()

    def make(layer: nn.Module, inputs: Affine | None) -> nn.Module:
        if isinstance(layer, nn.LSTMCell | nn.GRUCell):
            return FewBitsCell(layer, terms=terms)
        if isinstance(layer, nn.LSTM | nn.GRU):
            return FewBitsLayers(layer, terms=terms)
        if isinstance(layer, nn.Conv1d | nn.Conv2d):
            return FewBitsConv(layer, bits=bits, terms=terms)
        assert isinstance(layer, nn.Linear)
        return FewBits(layer.weight, layer.bias, bits=bits, terms=terms, inputs=inputs)

    return Scheme(name, description, refuses, make, is_calibrated)


def _torchao(format: others.TorchaoFormat, description: str, *, is_compiled: bool = False) -> Scheme:
    return Scheme(
        f"{format}.torchao{'-compiled' if is_compiled else ''}",
        description,
        partial(others.refuses_torchao, format=format),
        partial(others.Torchao, format=format, is_compiled=is_compiled),
    )


ALL: Final[dict[str, Scheme]] = {
    scheme.name: scheme
    for scheme in (
        _own("int8", "weights in 8 bits, a scale an output; activations as good as in 16", bits=8, terms=2),
        _own("int8-dynamic", "weights and activations in 8 bits, a scale an output and a row", bits=8, terms=1),
        _own(
            "int8-static", "the same, with the activations' scale seen beforehand", bits=8, terms=1, is_calibrated=True
        ),
        _own("int4", "weights in 4 bits, a scale for 64 inputs; activations as good as in 16", bits=4, terms=2),
        _own("int4-dynamic", "weights in 4 bits, activations in 8", bits=4, terms=1),
        Scheme("bf16.torch", "weights and activations in bfloat16", others.refuses_bf16, others.Bf16),
        Scheme("fp8.torch", "float8 e4m3, a scale a row, through torch._scaled_mm", others.refuses_fp8, others.Fp8),
        _torchao("int8", "torchao's Int8WeightOnlyConfig"),
        _torchao("int8-dynamic", "torchao's Int8DynamicActivationInt8WeightConfig"),
        _torchao("int4", "torchao's Int4WeightOnlyConfig, groups of 64"),
        _torchao("int8", "the same under torch.compile", is_compiled=True),
        _torchao("int8-dynamic", "the same under torch.compile", is_compiled=True),
    )
}
_CPU: Final = ("int8", "int8-dynamic", "int4", "int4-dynamic", "bf16.torch")
_CUDA: Final = ("bf16.torch", "fp8.torch", "int8.torchao", "int4.torchao")


def default(device: torch.device) -> tuple[str, ...]:
    """Schemes that are tried unless others are named: none that calibrate, compile, or were always slower there."""
    return _CUDA if device.type == "cuda" else _CPU


def scheme_of(name: str) -> Scheme:
    """A scheme by its name. UsageError with the known ones for another."""
    if name not in ALL:
        raise UsageError(f"scheme '{name}' is none of {', '.join(ALL)}")
    return ALL[name]


def refusal(scheme: Scheme, layer: nn.Module) -> str | None:
    """Why `layer` cannot have this scheme: by its type, what hangs on it, or the scheme's own limits; None when it can."""
    if type(layer) not in LAYERS:
        return f"{type(layer).__name__} is none of {', '.join(kind.__name__ for kind in LAYERS)}"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "hooks hang on it, which would be lost"
    return scheme.refuses(layer)
