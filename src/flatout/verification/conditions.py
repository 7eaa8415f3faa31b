"""The conditions under which a side of a proof runs: where random numbers start, and in which precision models compute."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flatout.profiling.patching import Patches


def seed_all(seed: int, patches: Patches) -> None:
    """Start all random numbers from `seed`, and move by it the seeds that the script sets itself.

    So a script that seeds itself with 0 runs as it is under seed 0, and on other numbers under another.
    """
    import numpy as np

    _moved(random, "seed", seed, patches)
    _moved(np.random, "seed", seed, patches)
    _moved(torch, "manual_seed", seed, patches)
    random.seed(0)
    np.random.seed(0)  # the legacy generator is what scripts use
    torch.manual_seed(0)


def _moved(owner: Any, name: str, by: int, patches: Patches) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(value + by if isinstance(value, int) else value, *args, **kwargs)

    patches.set(owner, name, seed)


class Precision:
    """Runs the script's models in another precision, from outside: all in float64, or under autocast."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], AbstractContextManager[object]]:
        """What a root module is to be called with, and the context to call it in.

        In float64 the module is converted where it stands, at its first call: its parameters stay the same objects, so optimizers
        that hold them go on.
        """
        if self._dtype == "":
            return args, kwargs, nullcontext()
        if self._dtype == "float64":
            if module not in self._converted:
                module.double()
                self._converted.add(module)
            return _doubled(args), _doubled(kwargs), nullcontext()
        device = next((p.device.type for p in module.parameters()), "cpu")
        return args, kwargs, torch.autocast(device, dtype=getattr(torch, self._dtype))


def _doubled(value: Any) -> Any:
    """A nest with its floating tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_doubled(v) for v in value)
    if type(value) is dict:
        return {k: _doubled(v) for k, v in value.items()}
    return value
