"""Running a function again on its inputs of the first time, without the caller noticing.

Before the call, copies are made of all tensors that it can be seen to use: those in its arguments, in its closure and in the
globals that it names, and the parameters, buffers and gradients of modules among all these. A rerun gets fresh copies in their
places, and the random numbers of the first time; afterwards everything is where it was. What else a function changes (a counter,
a cache, a file) changes again with every rerun; tensors that share memory do not share it in a rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatout.blocks.training.snapshot import random_state, set_random_state
from flatout.core.tensors.nests import map_tensors
from flatout.tune.verify.expect.bits import same_bits


class CallOutcome(NamedTuple):
    """What came of one run, by name: results, tensors that were written to as they are afterwards, gradients."""

    outputs: dict[str, Tensor]
    afterwards: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        """Results, written tensors and gradients together, by name."""
        return {**self.outputs, **self.afterwards, **self.gradients}


class _TensorSnapshot(NamedTuple):
    """A tensor as it was before the call."""

    name: str
    original: Tensor
    value: Tensor
    grad: Tensor | None


class _Reference(NamedTuple):
    """Where a tensor is looked up, and how another is put there."""

    original: Tensor
    put: Callable[[Any], None]


class CallReplay:
    """Made right before a call; `first` right after it tells its outcome, `again` runs once more."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._saved: dict[int, _TensorSnapshot] = {}
        self._references: list[_Reference] = []
        self._random = random_state()
        for number, arg in enumerate(args):
            self._save_nest(f"args[{number}]", arg)
        for name, arg in kwargs.items():
            self._save_nest(name, arg)
        for name, value, put in _surroundings(function):
            self._save_nest(name, value)
            if isinstance(value, Tensor):
                self._references.append(_Reference(value, put))

    def first(self, output: Any) -> CallOutcome:
        """The outcome of the call itself. Gradients are those that it left in `.grad`."""
        return self._outcome(_named_tensors(output), {key: saved.original for key, saved in self._saved.items()})

    def again(
        self, run: Callable[..., Any], *, dtype: torch.dtype | None = None, with_gradients: bool = False
    ) -> CallOutcome:
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
            return self._outcome({n: t.detach() for n, t in outputs.items()}, copies)

    def _outcome(self, outputs: dict[str, Tensor], tensors: Mapping[int, Tensor]) -> CallOutcome:
        """What came of a run on these tensors, each in the place of a saved one."""
        afterwards, gradients = {}, {}
        for key, saved in self._saved.items():
            now, grad = tensors[key], tensors[key].grad
            if not same_bits(now, saved.value.to(now.dtype)):
                afterwards[f"{saved.name} afterwards"] = now.detach()
            if grad is not None and _is_new(grad, saved.grad):
                gradients[f"gradient of {saved.name}"] = grad.detach()
        return CallOutcome(outputs, afterwards, gradients)

    # -- keeping ------------------------------------------------------------------------------------------------------------

    def _save_nest(self, name: str, value: Any) -> None:
        for path, leaf in _leaves(name, value):
            if isinstance(leaf, Tensor):
                self._save(path, leaf)
            elif isinstance(leaf, nn.Module):
                self._save_module(path, leaf)

    def _save(self, name: str, tensor: Tensor) -> None:
        if id(tensor) not in self._saved:
            grad = tensor.grad.detach().clone() if tensor.is_leaf and tensor.grad is not None else None
            self._saved[id(tensor)] = _TensorSnapshot(name, tensor, tensor.detach().clone(), grad)

    def _save_module(self, name: str, module: nn.Module) -> None:
        for path, inner in module.named_modules():
            for own in (inner._parameters, inner._buffers):
                for key, tensor in own.items():
                    if tensor is not None and not is_lazy(tensor):
                        self._save(".".join(part for part in (name, path, key) if part), tensor)
                        self._references.append(_Reference(tensor, partial(setattr, inner, key)))

    # -- putting copies in place --------------------------------------------------------------------------------------------

    @contextmanager
    def _in_place(self, dtype: torch.dtype | None) -> Iterator[dict[int, Tensor]]:
        copies = {key: _copy(saved, dtype) for key, saved in self._saved.items()}
        with ExitStack() as stack:
            for reference in self._references:
                reference.put(copies[id(reference.original)])
                stack.callback(reference.put, reference.original)
            yield copies

    def _copied(self, nest: Any, copies: dict[int, Tensor]) -> Any:
        return map_tensors(nest, lambda t: copies.get(id(t), t))


def _copy(saved: _TensorSnapshot, dtype: torch.dtype | None) -> Tensor:
    def changed(tensor: Tensor) -> Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.clone() if tensor.dtype == target else tensor.to(target)

    value = changed(saved.value)
    if isinstance(saved.original, nn.Parameter):
        value = nn.Parameter(value, requires_grad=saved.original.requires_grad)
    elif saved.original.requires_grad:
        value.requires_grad_()
    if saved.grad is not None:
        value.grad = changed(saved.grad)
    return value


def _surroundings(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """What a function uses without being given it: (name, value, how to put another there), that of what it wraps too."""
    visited: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        now = waiting.pop()
        if id(now) in visited:
            continue
        visited.add(id(now))
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
            yield name, value, partial(setattr, cell, "cell_contents")
        for name in code.co_names:
            if name in now.__globals__:
                value = now.__globals__[name]
                waiting += [value] if _is_users_function(value, now) else []
                yield name, value, partial(now.__globals__.__setitem__, name)


def _is_users_function(value: Any, caller: Any) -> bool:
    """Whether a function that is named lies in the same file: what that one uses counts too."""
    inner = getattr(value, "__wrapped__", value)
    return hasattr(inner, "__code__") and inner.__globals__ is caller.__globals__


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


def _is_new(now: Tensor, before: Tensor | None) -> bool:
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
