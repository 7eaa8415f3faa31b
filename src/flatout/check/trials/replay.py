"""Fresh arguments for captured calls of operators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from flatout.check.observe.operators.recorder import Example, TensorMeta
from flatout.check.trials.context import Scene, random_tensor

Dtypes = Mapping[torch.dtype, torch.dtype]
"""Dtypes to replace, by those they are replaced with."""
_AS_CAPTURED: Final[Dtypes] = MappingProxyType({})


def fresh_arguments(example: Example, scene: Scene, dtypes: Dtypes = _AS_CAPTURED) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for one captured call."""
    args = [fresh_argument(a, scene, dtypes) for a in example.args]
    return args, {k: fresh_argument(v, scene, dtypes) for k, v in example.kwargs.items()}


def fresh_argument(value: Any, scene: Scene, dtypes: Dtypes = _AS_CAPTURED) -> Any:
    """A captured argument with random tensors in place of descriptions."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], TensorMeta):
        meta, stride = value
        device = scene.device if meta.device != "cpu" else "cpu"
        return random_tensor(meta.shape, dtypes.get(meta.dtype, meta.dtype), device=device, stride=stride)
    if isinstance(value, torch.dtype):
        return dtypes.get(value, value)
    if isinstance(value, list):
        return [fresh_argument(v, scene, dtypes) for v in value]
    return value
