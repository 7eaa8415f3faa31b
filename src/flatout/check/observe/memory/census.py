"""The tensors that are alive, and what they serve as: parameters, buffers, gradients, optimizer state, or something else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import compress
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.check.observe.memory.graphs import AutogradGraph, node_of
from flatout.core.tensors.nests import tensors_in

_ROOTS_WALKED: Final = 2_000
"""Tensors whose graphs are followed in one census."""


class Census:
    """All tensors that Python holds now. One pass over the garbage collector's objects: some ten ms with torch loaded.

    Keep it no longer than needed: it holds the tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        lists: tuple[list[Any], ...] = (self.tensors, self.modules, self.optimizers)
        found = [
            (_subclasses(base), of_kind) for base, of_kind in zip((Tensor, nn.Module, Optimizer), lists, strict=True)
        ]
        wanted = frozenset[int]().union(*(kinds for kinds, _ in found))
        things = gc.get_objects()
        # By the identity of types, in loops of C: a lazy proxy's isinstance would run the user's code, and there are a million.
        for thing in compress(things, map(wanted.__contains__, map(id, map(type, things)))):
            next(of_kind for kinds, of_kind in found if id(type(thing)) in kinds).append(thing)

    def roles(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors whose kind is known, with it; the first kind named for a memory is the right one."""
        for tensor in self.tensors:
            if issubclass(type(tensor), nn.Parameter):
                yield "parameters", tensor
        for module in self.modules:
            for buffer in vars(module).get("_buffers", {}).values():
                if isinstance(buffer, Tensor):
                    yield "buffers", buffer
        for optimizer in self.optimizers:
            for state in dict(vars(optimizer).get("state", {})).values():
                for tensor in tensors_in(state):
                    yield "optimizer state", tensor
            for parameter in parameters_of(optimizer):
                yield "parameters", parameter
        for tensor in self.tensors:
            grad = gradient_of(tensor)
            if grad is not None:
                yield "gradients", grad

    def graph(self) -> AutogradGraph:
        """The graphs that living tensors hold."""
        graph = AutogradGraph()
        nodes = [n for n in map(node_of, self.tensors) if n is not None]
        graph.walk(nodes[:_ROOTS_WALKED])
        return graph


def _subclasses(base: type) -> frozenset[int]:
    """The identities of a class and of all that are derived from it."""
    found = {id(base)}
    waiting: list[type] = [base]
    while waiting:
        derived: list[type] = type.__subclasses__(waiting.pop())
        new = [kind for kind in derived if id(kind) not in found]
        found.update(map(id, new))
        waiting += new
    return frozenset(found)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer trains."""
    for group in vars(optimizer).get("param_groups", ()):
        yield from (p for p in group["params"] if isinstance(p, Tensor))


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient of a leaf; None otherwise (asking others warns)."""
    if not tensor.requires_grad and not issubclass(type(tensor), nn.Parameter):
        return None
    grad: Any = tensor.grad if _is_leaf(tensor) else None
    return grad if isinstance(grad, Tensor) else None


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return bool(tensor.is_leaf)
    except (RuntimeError, Warning):
        return False
