"""Who listens to the steps of all optimizers may come and go at any time, also from within such a call.

torch walks over its global hooks while it calls them, and raises where one is added or removed meanwhile and another follows. So
one hook of ours stands there on each side of a step, and calls who listens. Nobody hears of steps in what `torch.compile`
compiles: the hook would become part of the graph, or break it. Steps that are captured into a CUDA graph are not run: who
listens hears of their replays (`StepGraphs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flatout.core.runtime.step_graphs import is_step_captured, note_step

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
BeforeStep = Callable[[Optimizer, Any, Any], Arguments | None]
"""Called with the optimizer and the arguments of its step; may return others in their place."""
AfterStep = Callable[[Optimizer, Any, Any], None]


class OptimizerStepHooks:
    """What is called before and after each step of each optimizer of this process, until `remove`."""

    def __init__(self, *, before: BeforeStep | None = None, after: AfterStep | None = None) -> None:
        self._before, self._after = before, after
        if before is not None:
            _BEFORE.add(before)
        if after is not None:
            _AFTER.add(after)

    def remove(self) -> None:
        """Call neither of them any more; nothing happens the second time."""
        if self._before is not None:
            _BEFORE.remove(self._before)
        if self._after is not None:
            _AFTER.remove(self._after)
        self._before = self._after = None


class _Side:
    """One side of the steps: our hook there, and who listens."""

    def __init__(self, register: Callable[[Any], RemovableHandle]) -> None:
        self.listeners: tuple[Callable[..., Any], ...] = ()
        self._register = register
        self._handle: RemovableHandle | None = None
        self._depth = 0

    def add(self, listener: Callable[..., Any]) -> None:
        self.listeners = (*self.listeners, listener)
        if self._handle is None or self._handle.id not in (self._handle.hooks_dict_ref() or {}):
            self._handle = self._register(self._on_step)  # somebody may have cleared torch's hooks

    def remove(self, listener: Callable[..., Any]) -> None:
        self.listeners = tuple(one for one in self.listeners if one is not listener)
        if not self.listeners and self._handle is not None and self._may_go(self._handle):
            self._handle.remove()
            self._handle = None

    def _may_go(self, handle: RemovableHandle) -> bool:
        """Whether torch's walk is not disturbed: there is none now, or ours is its last hook. Else it stays, and does nothing."""
        hooks = handle.hooks_dict_ref()
        return not self._depth or hooks is None or next(reversed(hooks), None) == handle.id

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        if torch.compiler.is_dynamo_compiling():  # dynamo folds this, so that nothing of ours is in the graph
            return None
        if is_step_captured():
            if self is _AFTER:
                note_step(optimizer)
            return None
        changed: Arguments | None = None
        self._depth += 1
        try:
            for listener in self.listeners:
                result = listener(optimizer, args, kwargs)
                if result is not None:
                    changed = args, kwargs = result
        finally:
            self._depth -= 1
        return changed


_BEFORE: Final = _Side(register_optimizer_step_pre_hook)
_AFTER: Final = _Side(register_optimizer_step_post_hook)
