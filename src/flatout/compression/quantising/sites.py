"""Where layers sit in a model: finding them, putting another in their place, and who reads their weights without calling them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from flatout.errors import UsageError

_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""They hand their layers' weights to one operator instead of calling the layers, in some modes or all."""


def owner(model: nn.Module, path: str) -> nn.Module:
    """The module at a path; UsageError when there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError as e:
        raise UsageError(f"{type(model).__name__} has no layer '{path}'; look at named_modules()") from e


def place(model: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """Put `layer` at `path` and wherever else the same module sits; returns the model, or `layer` for the model's own path."""
    old = owner(model, path)
    if old is model:
        return layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = layer
    return model


def parents(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose children's weights are read without a call, by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, _READERS)}


def read_by_parent(path: str, inside: Mapping[str, nn.Module]) -> str | None:
    """Why the layer at `path` must stay: its parent takes its weights itself; None when it does not."""
    for at, module in inside.items():
        if path.startswith(f"{at}." if at else ""):
            return f"{type(module).__name__} '{at}' reads its layers' weights itself"
    return None
