"""What the layers of a model are called with while it works on an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.core.tensors import nests as pytree

MAX_RECORDED_CALLS = 8
"""Calls of a layer whose inputs are saved: a cell is called once a step, and its steps are alike."""


class LayerCall(NamedTuple):
    """Arguments of one call of a layer, as detached copies."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module) -> Any:
        """The outputs of a layer, called with these arguments."""
        return layer(*self.args, **self.kwargs)


class LayerCalls(NamedTuple):
    """The first calls of a layer in one call of the model, and how many there were in all."""

    first: list[LayerCall]
    num: int

    def run(self, layer: nn.Module) -> None:
        """Call a layer once with each of the saved arguments."""
        for call in self.first:
            call.run(layer)


def layer_calls(model: nn.Module, paths: Sequence[str], inputs: Sequence[Any]) -> dict[str, LayerCalls]:
    """Calls of the layers at `paths` while `model` works on `inputs`; layers that were not called are not in it."""
    first: dict[str, list[LayerCall]] = {path: [] for path in paths}
    counts = dict.fromkeys(paths, 0)

    def save(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counts[path] += 1
        if len(first[path]) < MAX_RECORDED_CALLS:
            first[path].append(LayerCall(*pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))))

    with watched_layers(model, paths, save), torch.inference_mode():
        model(*inputs)
    return {path: LayerCalls(first[path], num) for path, num in counts.items() if num}


def watched_layers(
    model: nn.Module, paths: Sequence[str], on_call: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> ExitStack:
    """A context in which `on_call` gets path and arguments of each call of these layers; their hooks are gone afterwards."""
    hooks = ExitStack()
    for path in paths:
        handle = model.get_submodule(path).register_forward_pre_hook(
            lambda _, args, kwargs, path=path: on_call(path, args, kwargs), with_kwargs=True
        )
        hooks.enter_context(handle)
    return hooks
