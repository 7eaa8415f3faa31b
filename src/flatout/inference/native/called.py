"""An engine in the place of the model that it was built from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.inference.native.engine import Engine


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
        if [tuple(x.shape) for x in inputs] == self._shapes:
            return _tensors(self.engine.step(*inputs))
        sizes = {x.shape[0] // shape[0] for x, shape in zip(inputs, self._shapes, strict=True) if shape}
        if len(sizes) != 1 or any(
            tuple(x.shape) != (shape[0] * min(sizes), *shape[1:]) for x, shape in zip(inputs, self._shapes, strict=True)
        ):
            raise UsageError(
                f"inputs {[tuple(x.shape) for x in inputs]} are no multiple of those the engine was built for: {self._shapes}"
            )
        pieces = zip(*(x.split(shape[0]) for x, shape in zip(inputs, self._shapes, strict=True)), strict=True)
        found = [_tensors(self.engine.step(*(p.contiguous() for p in piece))) for piece in pieces]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        return torch.cat(found)


def _tensors(outputs: Any) -> Any:
    return tuple(map(torch.from_numpy, outputs)) if isinstance(outputs, tuple) else torch.from_numpy(outputs)
