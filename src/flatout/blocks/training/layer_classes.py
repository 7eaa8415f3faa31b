"""Layers of a model that become those of another class, in place: parameters, hooks and names stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from torch import nn


def is_plain_convolution(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is an `nn.Conv2d` of one group that nobody derived from or changed."""
    return type(module) is nn.Conv2d and "forward" not in vars(module) and module.groups == 1


def with_class(layers: Sequence[nn.Module], wanted: type[nn.Module]) -> Callable[[], None]:
    """Make them objects of this class, which adds no attributes; returns the undo."""
    before = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = wanted

    def undo() -> None:
        for layer, one in zip(layers, before, strict=True):
            layer.__class__ = one

    return undo
