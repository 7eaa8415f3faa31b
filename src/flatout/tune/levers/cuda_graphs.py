"""Calls of one module replayed from CUDA graphs, one for each kind of call: shapes, dtypes, modes, and all that is no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.core.tensors.nests import tree_flatten, tree_unflatten

_CALLS_BEFORE: Final = 3
"""Equal calls that go by before one is captured. With gradients it is the very first call or none: an autograd graph that is
still there from an earlier call, on another stream, makes capturing fail; and capturing warms up by itself."""
_MOST_GRAPHS: Final = 8
"""Each keeps memory of its own."""

Make = Callable[[nn.Module, tuple[Tensor, ...]], Callable[..., Any]]
"""Captures a module called with these tensors, and gives what replays it: `torch.cuda.make_graphed_callables`."""


class GraphedForward:
    """A module's forward that replays CUDA graphs. Calls that are rare, or cannot be captured, go to the original."""

    def __init__(self, module: nn.Module, make: Make, on_captured: Callable[[], None] = lambda: None) -> None:
        self._module = module
        self._forward = module.forward
        self._make = make
        self._on_captured = on_captured
        self._num_calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        kind = self._kind(leaves, form)
        if kind is None or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        graph = self._graphs.get(kind)
        if graph is None:
            if not self._is_due(kind):
                return self._forward(*args, **kwargs)
            graph = self._captured(leaves, form, tensors)
            self._graphs[kind] = graph
            self._on_captured()
        return graph(*tensors)

    def _is_due(self, kind: Hashable) -> bool:
        """Whether the call at hand is one to capture."""
        is_first = not self._num_calls
        self._num_calls[kind] += 1
        if torch.is_grad_enabled():
            return is_first
        return self._num_calls[kind] > _CALLS_BEFORE and len(self._graphs) < _MOST_GRAPHS

    def _kind(self, leaves: list[Any], form: Any) -> Hashable | None:
        """What two calls must share to be one graph; None for a call that no graph can stand for."""
        if torch.is_inference_mode_enabled():
            return None  # its tensors cannot be written into afterwards
        parts: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.device.type == "cpu" and torch.cuda.is_available():
                    return None  # a graph would copy it once, and never again
                parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            elif leaf is None or isinstance(leaf, (bool, int, float, str)):
                parts.append((type(leaf), leaf))
            else:
                return None
        modes = tuple(m.training for m in self._module.modules())
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return (str(form), tuple(parts), modes, torch.is_grad_enabled(), autocast)

    def _captured(self, leaves: list[Any], form: Any, tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
        call = _OfTensors(self._module, self._forward, leaves, form)
        with _saved_state(self._module), _without_autocast_cache():
            samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
            graph = self._make(call, samples)

        def replay(*inputs: Tensor) -> Any:
            leaves, form = tree_flatten(graph(*inputs))
            # The next replay writes into what this one returned; a loss or logits may be kept by the script.
            return tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], form)

        return replay


class _OfTensors(nn.Module):
    """A module's forward as a function of its tensors alone; its parameters are those of the module."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], leaves: list[Any], form: Any) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._forward = forward
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._form = form

    def forward(self, *tensors: Tensor) -> Any:
        """The call with these tensors, and everything else as it was."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._form)
        return self._forward(*args, **kwargs)


@contextmanager
def _saved_state(module: nn.Module) -> Iterator[None]:
    """Buffers (running statistics) and random numbers as they were: capturing runs the module a few times."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    devices = [p.device for p in module.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Weights are cast inside the graph, not before it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def captured_on_device(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
    """A CUDA graph of one call on the device that the module is on: a `Make`."""
    graphed = torch.cuda.make_graphed_callables(module, samples, allow_unused_input=True)
    assert callable(graphed)
    return graphed
