"""Where layers sit in a model: finding them, putting another in their place, and who reads their weights without calling them."""

from __future__ import annotations

from torch import nn

from flatout.core.errors import UsageError

_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""They hand their layers' weights to one operator instead of calling the layers, in some modes or all."""


def layer_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path; UsageError when there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError as e:
        raise UsageError(f"{type(model).__name__} has no layer '{path}'; look at named_modules()") from e


def replace_layer(model: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """Put `layer` at `path` and wherever else the same module sits; returns the model, or `layer` for the model's own path."""
    old = layer_at(model, path)
    if old is model:
        return layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = layer
    return model


def read_by_parents(model: nn.Module) -> dict[str, str]:
    """Why layers must stay whose parent takes their weights itself, by path."""
    found: dict[str, str] = {}
    for at, module in model.named_modules():
        if isinstance(module, _READERS):
            inside = dict(module.named_modules(prefix=at))
            found = dict.fromkeys(inside, f"{type(module).__name__} '{at}' reads its layers' weights itself") | found
    return found
