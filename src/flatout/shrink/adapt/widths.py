"""How many numbers a vector has that comes out of a module, or goes into one, and along which dimension it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import nn

from flatout.core.errors import UsageError


class Width(NamedTuple):
    channels: int
    num_spatial: int | None = 0
    """Dimensions behind the channels: 0 for [..., C], 2 for images; None: all but the first two."""


def width_after(path: str, module: nn.Module) -> Width:
    """Width of a module's output; a container's is that of the last layer in it that has one.

    Raises UsageError where no layer tells it.
    """
    found = [width for inner in module.modules() if (width := _out(inner)) is not None]
    if not found:
        raise UsageError(f"'{path}' ({type(module).__name__}) has no layer that tells its width; name a layer")
    return found[-1] if _out(module) is None else found[0]


def channels_before(path: str, module: nn.Module) -> int:
    """C of the module's first input [B, T, C]: what the first layer in it that has weights takes.

    Raises UsageError where no layer tells it.
    """
    for inner in module.modules():
        for kind, channels in _IN.items():
            if isinstance(inner, kind):
                return int(channels(inner))
    raise UsageError(f"'{path}' ({type(module).__name__}) has no layer that tells the width of its input; name another")


def _out(module: nn.Module) -> Width | None:
    return next((width(module) for kind, width in _OUT.items() if isinstance(module, kind)), None)


_IN: Final[dict[Any, Callable[[Any], int]]] = {
    nn.Linear: lambda m: m.in_features,
    nn.LayerNorm: lambda m: m.normalized_shape[-1],
    nn.MultiheadAttention: lambda m: m.embed_dim,
    nn.RNNBase: lambda m: m.input_size,
}
_OUT: Final[dict[Any, Callable[[Any], Width]]] = {
    nn.Linear: lambda m: Width(m.out_features),
    nn.modules.conv._ConvNd: lambda m: Width(m.out_channels, len(m.kernel_size)),
    nn.LayerNorm: lambda m: Width(int(m.normalized_shape[-1])),
    nn.Embedding: lambda m: Width(m.embedding_dim),
    nn.MultiheadAttention: lambda m: Width(m.embed_dim),
    nn.RNNBase: lambda m: Width((m.proj_size or m.hidden_size) * (2 if m.bidirectional else 1)),
    nn.RNNCellBase: lambda m: Width(m.hidden_size),
    nn.GroupNorm: lambda m: Width(m.num_channels, None),
    nn.modules.batchnorm._BatchNorm: lambda m: Width(m.num_features, None),
}
