"""Images in channels_last beyond the module that is tried: what takes them must not raise where the edit is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.check.observe.calls import Captured, RootModule
from flatout.check.trials.context import Refused, Scene
from flatout.check.trials.module_call import call_of, copied_module
from flatout.core.records.evidence import Operator
from flatout.core.records.workload import Source, short_place
from flatout.core.tensors.nests import map_tensors, tensors_in

_CALL: Final = ".view("
"""A reshape(), which takes any strides, is the same operator on contiguous images: the line's text tells them apart."""


def in_channels_last(tensor: Tensor) -> Tensor:
    """The images in channels_last; what is no batch of images as it is."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def refuse_where_images_break(
    root: RootModule, model: nn.Module, captured: Captured, args: Any, kwargs: Any, scene: Scene
) -> None:
    """Try what the script does with this model's images besides: its own `.view` calls, and the other root modules.

    Args:
        root: The model's calls.
        model: Its copy in channels_last.
        captured: How it was called.
        args, kwargs: Its inputs in channels_last.
        scene: The other root modules with their inputs, and the step's operators.

    Raises:
        Refused: One of them does not take the images as they then lie in memory.
    """
    results = call_of(model, captured, args, kwargs, backward=False)()
    images = [t.detach() for t in tensors_in((results, args, kwargs)) if t.dim() == 4]
    for operator, source in _views(root.name, scene):
        for image in images:
            if tuple(image.shape) == operator.inputs[0].shape and not _can_view(image, operator.outputs[0].shape):
                place = source.via[-1].place if source.via else short_place(source.file, source.line)
                raise Refused(f".view raises on images in channels_last at {place}; .reshape there would take them")
    outputs = {tuple(t.shape): t.detach() for t in tensors_in(results) if t.dim() == 4}
    for other in scene.roots:
        if other is not root and other.alive is not None and other.captured is not None:
            _try_on(other, other.alive, other.captured, outputs)


def _try_on(other: RootModule, module: nn.Module, captured: Captured, outputs: dict[tuple[int, ...], Tensor]) -> None:
    """Run another root module on the model's own output wherever an input of it has that shape."""
    shapes = {tuple(t.shape) for t in tensors_in((captured.args, captured.kwargs))}
    if not shapes & set(outputs):
        return

    def replaced(tensor: Tensor) -> Tensor:
        image = outputs.get(tuple(tensor.shape))
        return tensor if image is None else image.clone().requires_grad_(tensor.requires_grad)

    args, kwargs = (map_tensors(value, replaced) for value in (captured.args, captured.kwargs))
    try:
        call_of(copied_module(module), captured, args, kwargs, backward=other.graphs_used > 0)
    except Refused as e:
        raise Refused(f"{other.name} gets its result in channels_last: {e}") from e


def _views(name: str, scene: Scene) -> Iterator[tuple[Operator, Source]]:
    """The calls of `.view` on batches of images outside the model of this name, with their lines."""
    for operator in scene.operators:
        is_outside = f"{operator.module}.".partition(".")[0] != name
        if operator.op == "aten.view" and operator.phase != "backward" and is_outside and operator.source >= 0:
            source = scene.sources[operator.source]
            text = source.via[-1].text if source.via else source.text
            if _CALL in text and len(operator.inputs[0].shape) == 4:
                yield operator, source


def _can_view(image: Tensor, shape: Iterable[int]) -> bool:
    try:
        image.view(tuple(shape))
    except RuntimeError:  # the strides do not allow it
        return False
    return True
