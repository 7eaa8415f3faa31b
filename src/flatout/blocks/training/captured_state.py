"""Calls of a function of no module, or of a method of an object that holds tensors, replayed from CUDA graphs.

The tensors among the object's attributes go into the graph as arguments do; those that the method puts in the place of others
come out of it, and are set on the object.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from flatout.blocks.training.captured_calls import SCALARS, CaptureCall, CapturedCalls, NotCapturable

R = TypeVar("R")

_CONTAINERS: Final = (list, dict, set)


class StateCalls:
    """The graphs of one function, and those of one method of each object."""

    def __init__(self, name: str, capture: CaptureCall | None = None) -> None:
        self._name, self._capture = name, capture
        self._own: CapturedCalls | None = None
        self._of_object: weakref.WeakKeyDictionary[Any, CapturedCalls] = weakref.WeakKeyDictionary()
        self._holder = nn.Module()
        """A module without parameters: the tensors are all arguments."""

    def of_function(self, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """A call of a function of its arguments alone, replayed where there is a graph for it."""
        if self._own is None:
            self._own = self._calls()
        result: R = self._own.run(function, args, kwargs)
        return result

    def of_method(self, method: Callable[..., R], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """A call of a method of `owner`, replayed where there is a graph for it.

        It runs as it is where `owner` holds no tensors, compares by value, or cannot be referred to weakly.
        """
        state = getattr(owner, "__dict__", {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        if not tensors or not _can_be_known(owner):
            return method(owner, *args, **kwargs)
        if owner not in self._of_object:
            self._of_object[owner] = self._calls()
        owner_now = weakref.ref(owner)  # a graph keeps the function, and must not keep the object
        others = [value if isinstance(value, SCALARS) else id(value) for n, value in state.items() if n not in tensors]

        def function(tensors: dict[str, Tensor], _: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            present = owner_now()
            if all(vars(present)[name] is tensor for name, tensor in tensors.items()):
                return method(present, *args, **kwargs), {}
            shadow = _shadow(present, tensors)
            before = _without_tensors(shadow)
            result = method(shadow, *args, **kwargs)
            if vars(shadow).keys() != vars(present).keys() or _without_tensors(shadow) != before:
                raise NotCapturable("they change attributes that are no tensors")
            return result, {name: vars(shadow)[name] for name in tensors if vars(shadow)[name] is not tensors[name]}

        result, changed = self._of_object[owner].run(function, (tensors, others, args, kwargs), {})
        state.update(changed)
        found: R = result
        return found

    def _calls(self) -> CapturedCalls:
        return CapturedCalls(self._holder, self._capture, name=self._name)


def _can_be_known(owner: Any) -> bool:
    """Whether graphs can be kept with the object, for as long as it lives."""
    try:
        hash(owner)
        weakref.ref(owner)
    except TypeError:
        return False
    return getattr(type(owner), "__eq__", None) is object.__eq__


def _shadow(owner: Any, tensors: dict[str, Tensor]) -> Any:
    """An object of the same class and attributes, with these tensors, and containers of its own."""
    shadow = object.__new__(type(owner))
    for name, value in vars(owner).items():
        vars(shadow)[name] = copy.copy(value) if isinstance(value, _CONTAINERS) else value
    vars(shadow).update(tensors)
    return shadow


def _without_tensors(owner: Any) -> list[Any]:
    """What tells the other attributes from what they were; of containers how much they hold."""
    return [
        (
            name,
            value if isinstance(value, SCALARS) else (id(value), len(value) if isinstance(value, _CONTAINERS) else 0),
        )
        for name, value in vars(owner).items()
        if not isinstance(value, Tensor)
    ]
