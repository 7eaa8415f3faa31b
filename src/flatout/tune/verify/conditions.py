"""The conditions under which a side of a proof runs: where random numbers start, and in which precision models compute."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.core.records.verdict import PRECISIONS
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.nests import map_tensors, tensors_in
from flatout.tune.verify.ordered_draws import ordered_draws


def seed_all(seed: int, patches: Patches) -> None:
    """Start all random numbers from `seed`, and move by it the seeds that the script sets itself.

    So a script that seeds itself with 0 runs as it is under seed 0, and on other numbers under another.
    """
    _moved(random, "seed", seed, patches)
    _moved(torch, "manual_seed", seed, patches)
    random.seed(0)
    torch.manual_seed(0)
    with suppress(ImportError):  # a script without NumPy draws nothing from it
        import numpy as np

        _moved(np.random, "seed", seed, patches)
        np.random.seed(0)  # the legacy generator is what scripts use


def _moved(owner: Any, name: str, by: int, patches: Patches) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(value + by if isinstance(value, int) else value, *args, **kwargs)

    patches.set(owner, name, seed)


_TAKE_BOTH: Final = ("to", "type_as", "copy_", "set_", "backward", "grad", "__set__", "__get__", "is_floating_point")


def coarsest(precisions: Iterable[str]) -> str:
    """The coarsest of some precisions; '' of none.

    >>> coarsest(["tf32", "", "float32"])
    'tf32'
    """
    return max(precisions, key=("", *PRECISIONS).index, default="")


def roundoff(precision: str) -> float:
    """The spacing of numbers next to 1. TF32 has ten bits after the point, as float16 (NVIDIA A100 white paper, 2020)."""
    return float(torch.finfo(torch.float16 if precision == "tf32" else getattr(torch, precision)).eps)


class SidePrecision:
    """Runs the script's models in another precision, from outside: all in float64 or float32, products in TF32, or autocast."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wide = _MixedWidths()

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], AbstractContextManager[object]]:
        """What a root module is to be called with, and the context to call it in.

        In float64 and float32 the module is converted where it stands, at its first call: its parameters stay the same objects,
        so optimizers that hold them go on.
        """
        if self._dtype == "":
            return args, kwargs, nullcontext()
        if self._dtype in ("float64", "float32"):
            dtype: torch.dtype = getattr(torch, self._dtype)
            if module not in self._converted:
                self._wide.was_narrow |= any(p.dtype == torch.float32 for p in module.parameters())
                module.to(dtype)
                self._converted.add(module)
            return cast_floats(args, dtype), cast_floats(kwargs, dtype), nullcontext()
        if self._dtype == "strict":
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            return args, kwargs, nullcontext()
        if self._dtype == "tf32":
            torch.set_float32_matmul_precision("high")  # for the rest of a process that is there for nothing else
            return args, kwargs, nullcontext()
        device = next((p.device.type for p in module.parameters()), "cpu")
        return args, kwargs, torch.autocast(device, dtype=getattr(torch, self._dtype))

    def finish(self, output: Any) -> Any:
        """What a root module returned, as the script gets it: results of autocast in float32, for losses that take no other."""
        return cast_floats(output, torch.float32) if self._dtype in ("float16", "bfloat16") else output

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """A context for the whole script: what is computed outside its models takes numbers of both precisions.

        Where a model was float32, random numbers for its float64 tensors are those that it would have drawn in float32.
        """
        if self._dtype not in ("float64", "float32"):
            yield
            return
        with self._wide, ordered_draws(lambda: self._wide.was_narrow):
            yield

    def prepare_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring what an optimizer made before the first call (Adagrad's sums) into the precision of its parameters."""
        if self._dtype not in ("float64", "float32"):
            return
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.shape == parameter.shape
                    and value.dim()
                ):
                    state[name] = value.to(parameter.dtype)


class _MixedWidths(TorchFunctionMode):
    """What surrounds models that run in another precision than their script was written for.

    Functions that are given float32 and float64 compute in float64: losses, products and scatters refuse a mixture.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        floats = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
        if {torch.float32, torch.float64} <= floats and name not in _TAKE_BOTH:
            if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
                into = next(tensors_in(args[0])).dtype
                args = (args[0], *cast_floats(tuple(args[1:]), into))
                kwargs = cast_floats(dict(kwargs), into)
            elif "out" not in kwargs:
                args, kwargs = cast_floats(tuple(args), torch.float64), cast_floats(dict(kwargs), torch.float64)
        return func(*args, **kwargs)


def cast_floats(nest: Any, dtype: torch.dtype) -> Any:
    """A nest with its real floating tensors in this dtype."""
    return map_tensors(nest, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
