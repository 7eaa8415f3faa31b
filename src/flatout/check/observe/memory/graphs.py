"""Autograd graphs, read from outside: their nodes, and the tensors saved in them. Nothing is unpacked or changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

MAX_NODES: Final = 50_000
"""Nodes visited in one walk; about 2 us each."""
_NO_NUMBER: Final = 1 << 62
"""Nodes that accumulate gradients carry the largest number there is instead of one of their own."""


class AutogradGraph:
    """The nodes reached from some tensors, their sequence numbers, and what they hold.

    A number is the count of nodes that the thread had created before: larger is younger.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.saved: list[Tensor] = []
        self.leaf_ids: set[int] = set()
        self.recomputes = False
        """Whether a node waits for a recomputation (torch.utils.checkpoint) in place of tensors."""
        self._nodes: dict[int, Any] = {}

    def walk(self, roots: Iterable[Any], *, oldest: int = -1) -> list[int]:
        """Visit what is reached from these nodes and not visited before; returns the numbers of the new nodes.

        Nodes older than number `oldest` are not followed.
        """
        new: list[int] = []
        waiting = [node for node in roots if node is not None]
        while waiting:
            node = waiting.pop()
            if id(node) in self._nodes:
                continue
            if len(self._nodes) >= MAX_NODES:
                break
            self._nodes[id(node)] = node  # referenced, so that no address comes twice
            number = node._sequence_nr()
            if number < _NO_NUMBER:
                self.numbers.add(number)
                new.append(number)
                if number < oldest:
                    continue
            elif isinstance(leaf := getattr(node, "variable", None), Tensor):
                self.leaf_ids.add(id(leaf))
            self._look_into(node)
            waiting.extend(below for below, _ in node.next_functions if below is not None)
        return new

    def close(self) -> None:
        """Let go of the nodes and of what they saved."""
        self._nodes.clear()
        self.saved.clear()

    def _look_into(self, node: Any) -> None:
        kind: type = type(node)
        if kind.__name__ == "CheckpointFunctionBackward":
            self.recomputes = True
        for name in _saved_names(kind):
            try:
                saved_value = getattr(node, name)
            except RuntimeError:  # a backward has gone through and freed it
                continue
            for saved in saved_value if isinstance(saved_value, (tuple, list)) else (saved_value,):
                self._add_saved(saved)
        own = getattr(node, "__dict__", None)  # what a custom Function put on its ctx
        if own:
            self.saved.extend(v for v in own.values() if isinstance(v, Tensor))

    def _add_saved(self, saved: Any) -> None:
        if saved is None:
            return
        try:
            data = saved.data
            hook = saved.unpack_hook
        except (RuntimeError, AttributeError):
            return
        if getattr(hook, "__module__", "") == "torch.utils.checkpoint":
            self.recomputes = True
        if isinstance(data, Tensor):
            self.saved.append(data)
        elif isinstance(data, (tuple, list)):
            self.saved.extend(d for d in data if isinstance(d, Tensor))


def node_of(tensor: Tensor) -> Any:
    """The node that produced this tensor, None for a leaf or where autograd has no answer."""
    try:
        return tensor.grad_fn if tensor.requires_grad else None
    except (RuntimeError, Warning):  # a view that was changed so that it has no gradient
        return None


def next_number() -> int:
    """The number of the node that this thread makes next."""
    return int(torch._C._autograd._get_sequence_nr())


def tensors_in_sequences(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operator or of autograd: one, or those in a sequence of sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in_sequences(item)


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """The attributes under which a kind of node shows what it saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
