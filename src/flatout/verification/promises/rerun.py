"""Running a function again on what it was given the first time, without the caller noticing.

Before the call, copies are made of all tensors that it can be seen to use: those in its arguments, in its closure and in the
globals that it names, and the parameters, buffers and gradients of modules among all these. A rerun gets fresh copies in their
places, and the random numbers of the first time; afterwards everything is where it was. What else a function changes (a counter,
a cache, a file) changes again with every rerun; tensors that share memory do not share it in a rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatout.numerics.nests import mapped
from flatout.training.random_state import random_state, set_random_state
from flatout.verification.promises.bits import same_bits


class Outcome(NamedTuple):
    """What came of one run, by name: results, tensors that were written to as they are afterwards, gradients."""

    outputs: dict[str, Tensor]
    afterwards: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        """All three."""
        return {**self.outputs, **self.afterwards, **self.gradients}


class _Kept(NamedTuple):
    """A tensor as it was before the call."""

    name: str
    original: Tensor
    value: Tensor
    grad: Tensor | None


class _Slot(NamedTuple):
    """Where a tensor is looked up, and how another is put there."""

    original: Tensor
    put: Callable[[Any], None]


class Stage:
    """Made right before a call; `first` right after it tells its outcome, `again` runs once more."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._kept: dict[int, _Kept] = {}
        self._slots: list[_Slot] = []
        self._random = random_state()
        for number, arg in enumerate(args):
            self._keep_nest(f"args[{number}]", arg)
        for name, arg in kwargs.items():
            self._keep_nest(name, arg)
        for name, value, put in _surroundings(function):
            self._keep_nest(name, value)
            if isinstance(value, Tensor):
                self._slots.append(_Slot(value, put))

    def first(self, output: Any) -> Outcome:
        """Of the call itself. Gradients are those that it left in `.grad`."""
        held = {k.name: k.original.detach() for k in self._kept.values() if not same_bits(k.original, k.value)}
        changed = {k.name: k.original.grad for k in self._kept.values() if _has_new_gradient(k.original.grad, k.grad)}
        return Outcome(_named_tensors(output), _afterwards(held), _gradients(changed))

    def again(
        self, run: Callable[..., Any], *, dtype: torch.dtype | None = None, with_gradients: bool = False
    ) -> Outcome:
        """One more run, of `run` in place of the function, with floating-point tensors in `dtype` if given.

        With `with_gradients` and results that have a graph, they are sent back with fixed random cotangents.
        """
        now = random_state()
        with self._in_place(dtype) as copies:
            set_random_state(self._random)
            try:
                output = run(*self._copied(self._args, copies), **self._copied(self._kwargs, copies))
                outputs = _named_tensors(output, is_detached=False)
                if with_gradients:
                    _send_back(outputs)
            finally:
                set_random_state(now)
            held = {
                k.name: copies[key].detach()
                for key, k in self._kept.items()
                if not same_bits(copies[key], k.value.to(copies[key].dtype))
            }
            grads = {k.name: copies[key].grad for key, k in self._kept.items()}
            begun = {k.name: k.grad for k in self._kept.values()}
        changed = {n: g for n, g in grads.items() if _has_new_gradient(g, begun[n])}
        return Outcome({n: t.detach() for n, t in outputs.items()}, _afterwards(held), _gradients(changed))

    # -- keeping ------------------------------------------------------------------------------------------------------------

    def _keep_nest(self, name: str, value: Any) -> None:
        for path, leaf in _leaves(name, value):
            if isinstance(leaf, Tensor):
                self._keep(path, leaf)
            elif isinstance(leaf, nn.Module):
                self._keep_module(path, leaf)

    def _keep(self, name: str, tensor: Tensor) -> None:
        if id(tensor) not in self._kept:
            grad = tensor.grad.detach().clone() if tensor.is_leaf and tensor.grad is not None else None
            self._kept[id(tensor)] = _Kept(name, tensor, tensor.detach().clone(), grad)

    def _keep_module(self, name: str, module: nn.Module) -> None:
        for path, inner in module.named_modules():
            for own in (inner._parameters, inner._buffers):
                for key, tensor in own.items():
                    if tensor is not None and not is_lazy(tensor):
                        self._keep(".".join(part for part in (name, path, key) if part), tensor)
                        self._slots.append(_Slot(tensor, _setter(inner, key)))

    # -- putting copies in place --------------------------------------------------------------------------------------------

    @contextmanager
    def _in_place(self, dtype: torch.dtype | None) -> Iterator[dict[int, Tensor]]:
        copies = {key: _copy(kept, dtype) for key, kept in self._kept.items()}
        with ExitStack() as stack:
            for slot in self._slots:
                slot.put(copies[id(slot.original)])
                stack.callback(slot.put, slot.original)
            yield copies

    def _copied(self, nest: Any, copies: dict[int, Tensor]) -> Any:
        return mapped(nest, lambda t: copies.get(id(t), t))


def _copy(kept: _Kept, dtype: torch.dtype | None) -> Tensor:
    def changed(tensor: Tensor) -> Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.clone() if tensor.dtype == target else tensor.to(target)

    value = changed(kept.value)
    if isinstance(kept.original, nn.Parameter):
        value = nn.Parameter(value, requires_grad=kept.original.requires_grad)
    elif kept.original.requires_grad:
        value.requires_grad_()
    if kept.grad is not None:
        value.grad = changed(kept.grad)
    return value


def _setter(owner: object, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


def _surroundings(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """What a function uses without being given it: (name, value, how to put another there), that of what it wraps too."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        now = waiting.pop()
        if id(now) in seen:
            continue
        seen.add(id(now))
        for hidden in ("__wrapped__", "_torchdynamo_orig_callable", "__func__"):
            if hasattr(now, hidden):
                waiting.append(getattr(now, hidden))
        if getattr(now, "__self__", None) is not None and hasattr(now, "__func__"):
            yield "self", now.__self__, lambda value: None
        if isinstance(now, nn.Module):
            yield type(now).__name__, now, lambda value: None
        code = getattr(now, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        for name, cell in zip(code.co_freevars, now.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            waiting += [value] if callable(value) and not isinstance(value, type) else []
            yield name, value, _setter(cell, "cell_contents")
        for name in code.co_names:
            if name in now.__globals__:
                value = now.__globals__[name]
                waiting += [value] if _is_users_function(value, now) else []
                yield name, value, _item_setter(now.__globals__, name)


def _is_users_function(value: Any, caller: Any) -> bool:
    """Whether a function that is named lies in the same file: what that one uses counts too."""
    inner = getattr(value, "__wrapped__", value)
    return hasattr(inner, "__code__") and inner.__globals__ is caller.__globals__


def _item_setter(owner: dict[str, Any], name: str) -> Callable[[Any], None]:
    return lambda value: owner.__setitem__(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What lies in lists, tuples and mappings, with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name}[{number}]", inner)
    else:
        yield name, value


def _named_tensors(output: Any, *, is_detached: bool = True) -> dict[str, Tensor]:
    """Tensors and numbers of a result, by their path."""
    found: dict[str, Tensor] = {}
    for name, leaf in _leaves("result", output):
        if isinstance(leaf, Tensor):
            found[name] = leaf.detach() if is_detached else leaf
        elif isinstance(leaf, (bool, int, float)):
            found[name] = torch.tensor(leaf, dtype=torch.float64)
    return found


def _afterwards(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name} afterwards": tensor for name, tensor in held.items()}


def _gradients(grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {f"gradient of {name}": grad.detach() for name, grad in grads.items() if grad is not None}


def _has_new_gradient(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None:
        return False
    return before is None or before.dtype != now.dtype or not torch.equal(before, now)


def _send_back(outputs: Mapping[str, Tensor]) -> None:
    """A backward from all results that have a graph, with the same random cotangents every time."""
    roots = [t for t in outputs.values() if t.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(0)
    cotangents = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(device=t.device, dtype=t.dtype)
        if t.dim()
        else torch.ones_like(t)
        for t in roots
    ]
    torch.autograd.backward(roots, cotangents)
