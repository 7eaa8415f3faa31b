"""The decorator that replays the calls of modules, methods and functions from CUDA graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
from torch import nn

from flatout.blocks.training.captured_calls import CapturedCalls
from flatout.blocks.training.captured_state import StateCalls
from flatout.core.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


@overload
def captured(what: M) -> M: ...
@overload
def captured(what: Callable[P, R]) -> Callable[P, R]: ...
def captured(what: Any) -> Any:
    """Replay the calls of a function or method from CUDA graphs, by decorating it: `@captured`; or those of one module.

    `captured(net)` changes the calls of this module in place and returns it; copies of it are plain, as those of a compiled
    module are. Calls run as they are until the fourth of a kind, which is captured, and always where the module or an argument
    is not on a CUDA device, where results are no tensors, where Python draws random numbers or changes attributes of the module,
    and where tensors from elsewhere are read. Of those that differ in a way that no call shows (a global variable) nothing can
    be known: a method that reads one is not for this.

    A plain function reads its arguments alone. A method of another object (an environment on the device) may read the tensors
    among its attributes, and put others in their place; the object's other attributes stay as they are.

    Raises:
        UsageError: The module is compiled. On a call, when `backward` runs twice through one replay.
    """
    return _captured_module(what) if isinstance(what, nn.Module) else _captured_function(what)


def _captured_module(module: M) -> M:
    if module._compiled_call_impl is not None:
        raise UsageError(
            f"{type(module).__name__} is compiled already, or captured; mode='reduce-overhead' of torch.compile captures too"
        )
    calls: list[CapturedCalls] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append(CapturedCalls(module))
        return calls[0].run(module._call_impl, args, kwargs)

    module._compiled_call_impl = call
    return module


def _captured_function(function: Callable[P, R]) -> Callable[P, R]:
    of_module: weakref.WeakKeyDictionary[nn.Module, CapturedCalls] = weakref.WeakKeyDictionary()
    others = StateCalls(function.__qualname__)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)  # a part of what is compiled
        owner, *rest = args or (None,)
        if isinstance(owner, nn.Module):
            calls = of_module.get(owner)
            if calls is None:
                calls = of_module[owner] = CapturedCalls(owner)
            return cast(R, calls.run(partial(cast(Callable[..., R], function), owner), tuple(rest), kwargs))
        if getattr(type(owner), function.__name__, None) is call:
            return others.of_method(function, owner, tuple(rest), kwargs)
        return others.of_function(function, args, kwargs)

    return call
