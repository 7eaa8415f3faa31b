"""How many numbers a vector has that comes out of a module, or goes into one, and along which dimension it lies."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from flatout.errors import UsageError


class Width(NamedTuple):
    channels: int
    num_spatial: int | None = 0
    """Dimensions behind the channels: 0 for [..., C], 2 for images; None: all but the first two."""


def width_after(path: str, module: nn.Module) -> Width:
    """Of the module's output; a container's is that of the last layer in it that has one.

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
        if isinstance(inner, nn.Linear):
            return inner.in_features
        if isinstance(inner, nn.LayerNorm):
            return int(inner.normalized_shape[-1])
        if isinstance(inner, nn.MultiheadAttention):
            return int(inner.embed_dim)
        if isinstance(inner, nn.RNNBase):
            return inner.input_size
    raise UsageError(f"'{path}' ({type(module).__name__}) has no layer that tells the width of its input; name another")


def _out(module: nn.Module) -> Width | None:
    if isinstance(module, nn.Linear):
        return Width(module.out_features)
    if isinstance(module, nn.modules.conv._ConvNd):
        return Width(module.out_channels, len(module.kernel_size))
    if isinstance(module, nn.LayerNorm):
        return Width(int(module.normalized_shape[-1]))
    if isinstance(module, nn.Embedding):
        return Width(module.embedding_dim)
    if isinstance(module, nn.MultiheadAttention):
        return Width(module.embed_dim)
    if isinstance(module, nn.RNNBase):
        return Width((module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1))
    if isinstance(module, nn.RNNCellBase):
        return Width(module.hidden_size)
    if isinstance(module, nn.GroupNorm):
        return Width(module.num_channels, None)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return Width(module.num_features, None)
    return None
