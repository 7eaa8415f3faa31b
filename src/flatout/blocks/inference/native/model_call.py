"""An engine in the place of the model that it was built from: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.inference.native.engine import Engine
from flatout.core.errors import UsageError


class Called:
    """An engine that is called as the model is: tensors in, tensors out.

    Batches of other sizes go through it in pieces as large as it was built for.
    """

    def __init__(self, engine: Engine, inputs: tuple[Any, ...]) -> None:
        """`inputs` are those that it was built with."""
        self.engine = engine
        self._shapes = [tuple(x.shape) for x in inputs]

    def __call__(self, *inputs: Tensor) -> Any:
        """As the model. Raises UsageError for inputs that do not consist of whole pieces."""
        if _num_pieces(inputs, self._shapes) == 1:
            return _tensors(self.engine.step(*inputs))
        pieces = zip(*(x.split(shape[0]) for x, shape in zip(inputs, self._shapes, strict=True)), strict=True)
        found = [_tensors(self.engine.step(*(p.contiguous() for p in piece))) for piece in pieces]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        return torch.cat(found)


class Carrying:
    """An engine with a state: `y = carrying(x)` is an event of every row, each with a state of its own."""

    def __init__(self, engine: Engine, inputs: tuple[Any, ...]) -> None:
        """`inputs` are those of one event of one row that it was built with, the state left out."""
        self.engine = engine
        self._shapes = [tuple(x.shape) for x in inputs]
        self._streams: Any = None
        self._num = 0

    def begun(self) -> Carrying:
        """Itself, as before the first event."""
        self.reset()
        return self

    def reset(self) -> None:
        """Return to the state before the first event."""
        self.engine.reset()
        self._streams, self._num = None, 0

    def __call__(self, *inputs: Tensor) -> Any:
        """The outputs but for the state. Raises UsageError when rows become more or fewer before `reset`, or have other sizes."""
        rows = _num_pieces(inputs, self._shapes)
        if self._num not in (0, rows):
            raise UsageError(f"{rows} rows came after {self._num}; call reset() first")
        self._num = rows
        if rows == 1:
            return _tensors(self.engine.step(*inputs))
        if self._streams is None:
            self._streams = self.engine.streams(rows)
        found = self._streams.step(
            *(x.reshape(rows, *shape).contiguous() for x, shape in zip(inputs, self._shapes, strict=True))
        )
        outputs = tuple(y.flatten(0, 1) for y in map(torch.from_numpy, found if isinstance(found, tuple) else (found,)))
        return outputs[0] if len(outputs) == 1 else outputs


def timed(engine: Engine, inputs: tuple[Any, ...]) -> Callable[[], object]:
    """One event as it costs least: buffers that are there, outputs written into them."""
    arrays = tuple(x.numpy() for x in inputs)
    found = engine.step(*arrays)
    out = found if isinstance(found, tuple) else (found,)
    return partial(engine.step, *arrays, *out)


def _num_pieces(inputs: tuple[Tensor, ...], shapes: list[tuple[int, ...]]) -> int:
    """How many times the rows that the engine was built for. Raises UsageError where it is no whole number."""
    found = [tuple(x.shape) for x in inputs]
    num = next((x[0] // shape[0] for x, shape in zip(found, shapes, strict=True) if x and shape and shape[0]), 1)
    if found != [(num * shape[0], *shape[1:]) if shape else () for shape in shapes]:
        raise UsageError(f"inputs {found} are no multiple of those the engine was built for: {shapes}")
    return num


def _tensors(outputs: Any) -> Any:
    return tuple(map(torch.from_numpy, outputs)) if isinstance(outputs, tuple) else torch.from_numpy(outputs)
