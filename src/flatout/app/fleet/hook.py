"""Waits in a Python process for a training to begin, at next to no cost, and has it watched then.

Nothing of torch is imported here: a process that never imports it pays for a finder of modules alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_OPTIMIZERS: Final = "torch.optim.optimizer"
FEWEST_STEPS: Final = 10
"""Optimizer steps before a process counts as a training job: tests of libraries and notebooks make a few."""


def await_training(environment: Mapping[str, str]) -> Callable[[], None]:
    """Watch the training that this process may become, where FLATOUT_WATCH is set to something else than 0.

    Returns:
        What ends the waiting, if no training has begun.
    """
    if environment.get("FLATOUT_WATCH", "0") in ("", "0") or any(isinstance(f, _ImportWatch) for f in sys.meta_path):
        return lambda: None
    steps = _FirstSteps()
    if _OPTIMIZERS in sys.modules:
        steps.install()
    else:
        sys.meta_path.insert(0, _ImportWatch(steps))
    return steps.remove


class _ImportWatch:
    """Finds no module itself; when torch's optimizers have been imported, their steps are counted."""

    def __init__(self, steps: _FirstSteps) -> None:
        self._steps = steps

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a loader that goes on to count steps; None for all other modules."""
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            self._steps.install()

        with suppress(AttributeError):  # a loader that takes no attributes: then nothing is watched
            loader.exec_module = exec_module
        return spec


class _FirstSteps:
    """Counts optimizer steps until there are enough for a training."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._pid = os.getpid()
        self._step_listener: Any = None

    def install(self) -> None:
        """Count the steps of all optimizers of this process."""
        from flatout.core.runtime.optimizer_steps import OptimizerStepHooks

        self._step_listener = OptimizerStepHooks(after=self._count)

    def remove(self) -> None:
        """Count no more, whether torch has been imported or not."""
        sys.meta_path[:] = [f for f in sys.meta_path if not (isinstance(f, _ImportWatch) and f._steps is self)]
        if self._step_listener is not None:
            self._step_listener.remove()

    def _count(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        if self._num_steps < FEWEST_STEPS:
            return
        self._step_listener.remove()
        if os.getpid() != self._pid:  # a forked child
            return
        from flatout.app.fleet.watcher import begin_to_watch

        begin_to_watch(optimizer, num_before=self._num_steps)
