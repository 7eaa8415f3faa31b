"""An update as one CUDA graph: what it reads and writes, its learning rates, and who hears of its replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers_module

from flatout.blocks.training.captured_calls import copied_all, copy_all
from flatout.core.runtime.dynamo_frames import frame_outside_dynamo
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.replayed_backwards import announce_replay
from flatout.core.tensors.nests import TreeSpec, tree_flatten, tree_unflatten


class LearningRate:
    """The learning rate of a group, on the device where graphs read it."""

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self.group = group
        self.tensor = torch.zeros((), dtype=torch.float32, device=device)
        self._value: float | None = None

    def refresh(self) -> None:
        """Put on the device what the group has now."""
        if (now := float(self.group["lr"])) != self._value:
            self.tensor.fill_(now)
            self._value = now


class UpdateCall(NamedTuple):
    """A call of an update: its arguments as leaves of a nest, and the optimizers that step in it, in each of its rounds."""

    function: Callable[..., Any]
    leaves: Sequence[Any]
    form: TreeSpec
    optimizers: Sequence[Optimizer]
    num_rounds: int
    is_compiled: bool


class UpdateGraph:
    """A captured update: its arguments and results lie where the graph reads and writes them."""

    def __init__(
        self,
        call: UpdateCall,
        rates: Sequence[LearningRate],
        outer: Sequence[weakref.ref[Tensor]],
        capture: Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]],
    ) -> None:
        own = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        self._inputs = [leaf for leaf in own if isinstance(leaf, Tensor)]
        self._last: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self._inputs)
        self._rates = rates
        self._is_valid = True
        self._outer = [weakref.ref(tensor, self._on_lost) for ref in outer if (tensor := ref()) is not None]
        self._is_valid = len(self._outer) == len(outer)
        args, kwargs = tree_unflatten(own, call.form)
        self._events: list[Sequence[Tensor] | Optimizer] = []
        with noted(self._events, call.optimizers, is_compiled=call.is_compiled):
            results, self._replay = capture(lambda: call.function(*args, **kwargs))
        if call.is_compiled:
            each = len(self._events) // call.num_rounds
            rounds = (self._events[number * each :][:each] for number in range(call.num_rounds))
            self._events = [event for backwards in rounds for event in (*backwards, *call.optimizers)]
        self._results, self._form = tree_flatten(results)
        self._tensors = [r.detach() for r in self._results if isinstance(r, Tensor)]
        parameters = [p for one in call.optimizers for group in one.param_groups for p in group["params"]]
        self._gradients = [(p, p.grad) for p in parameters]
        self._events = [e if isinstance(e, Optimizer) else [t.detach() for t in e] for e in self._events]

    def is_valid(self) -> bool:
        """Whether all tensors from elsewhere that it reads are still there; where parameters lie is part of its kind."""
        return self._is_valid

    def _on_lost(self, _: weakref.ref[Tensor]) -> None:
        self._is_valid = False

    def run(self, leaves: Sequence[Any]) -> Any:
        """One update: its results, which the next leaves alone."""
        with torch.no_grad():
            targets: list[Tensor] = []
            sources: list[Tensor] = []
            for number, tensor in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor)):
                last = self._last[number]
                if last is None or last[0]() is not tensor or last[1] != tensor._version:
                    targets.append(self._inputs[number])
                    sources.append(tensor)
                    self._last[number] = (weakref.ref(tensor), tensor._version)
            copy_all(targets, sources)
            for rate in self._rates:
                rate.refresh()
            self._replay()
            for parameter, gradient in self._gradients:  # those that a call in between left are another call's
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            results = self._copied()
        for event in self._events:
            if isinstance(event, Optimizer):
                call_hooks(event)
            else:
                announce_replay(event)
        return tree_unflatten(results, self._form)

    def _copied(self) -> list[Any]:
        """The results, which the next replay leaves alone."""
        copies = iter(copied_all(self._tensors))
        return [next(copies) if isinstance(r, Tensor) else r for r in self._results]


@contextmanager
def rates_on_device(rates: Sequence[LearningRate]) -> Iterator[None]:
    """Learning rates are tensors inside, and numbers again after it."""
    before = [rate.group["lr"] for rate in rates]
    try:
        for rate in rates:
            rate.group["lr"] = rate.tensor
        yield
    finally:
        for rate, value in zip(rates, before, strict=True):
            rate.group["lr"] = value


@contextmanager
def noted(
    events: list[Sequence[Tensor] | Optimizer], optimizers: Sequence[Optimizer], *, is_compiled: bool = False
) -> Iterator[None]:
    """Backwards and steps inside are noted; those who watch steps see nothing of them, for a capture updates nothing.

    Of compiled code backwards alone are noted: hooks would be a part of it.
    """
    original, patches = torch.autograd.backward, Patches()

    @frame_outside_dynamo
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        events.append([tensors] if isinstance(tensors, Tensor) else list(tensors))
        original(tensors, *args, **kwargs)

    def step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        events.append(optimizer)

    patches.set(torch.autograd, "backward", backward)
    try:
        with hooks_replaced(optimizers, {} if is_compiled else {0: step}):
            yield
    finally:
        patches.undo()


@contextmanager
def hooks_replaced(optimizers: Sequence[Optimizer], before: dict[int, Any]) -> Iterator[None]:
    """These hooks are called before steps inside, and no others."""
    patches = Patches()
    patches.set(optimizers_module, "_global_optimizer_pre_hooks", before)
    patches.set(optimizers_module, "_global_optimizer_post_hooks", {})
    for optimizer in optimizers:
        patches.set(optimizer, "_optimizer_step_pre_hooks", {})
        patches.set(optimizer, "_optimizer_step_post_hooks", {})
    try:
        yield
    finally:
        patches.undo()


def call_hooks(optimizer: Optimizer) -> None:
    """What is called before and after each step of an optimizer, for one that was replayed."""
    before, after = optimizers_module._global_optimizer_pre_hooks, optimizers_module._global_optimizer_post_hooks
    for hook in (*before.values(), *optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (optimizer,), {})
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *after.values()):
        hook(optimizer, (optimizer,), {})
