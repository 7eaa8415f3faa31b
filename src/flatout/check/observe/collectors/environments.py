"""Environments of reinforcement learning: how long the loop steps them, and where its iterations begin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Final

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.core.runtime.patches import Patches

_KINDS: Final = (
    ("gymnasium.core", "Env"),
    ("gymnasium.vector.vector_env", "VectorEnv"),
    ("gym.core", "Env"),
    ("gym.vector.vector_env", "VectorEnv"),
    ("stable_baselines3.common.vec_env.base_vec_env", "VecEnv"),
    ("tianshou.env.venvs", "BaseVectorEnv"),
    ("pettingzoo.utils.env", "AECEnv"),
    ("pettingzoo.utils.env", "ParallelEnv"),
    ("dm_env", "Environment"),
)
"""The classes that environments derive from: gymnasium's and gym's API, and those of the libraries that bring their own."""
_METHODS: Final = ("step", "reset", "step_async", "step_wait")


class EnvironmentSteps(Collector):
    """Watches `step` and `reset` of every environment on the observed thread; of nested ones (wrappers) the outermost."""

    def __init__(self, observation: ObservationState) -> None:
        self._observation = observation
        self._calls = observation.calls
        self._patches: Patches | None = None
        self._patched: set[type] = set()
        self._is_inside = False

    def install(self, patches: Patches) -> None:
        """Watch the classes that are there; later ones are found at the next borders of steps."""
        self._patches = patches
        self.find()

    def begin(self, mode: Mode) -> None:
        """Watch classes that were defined since."""
        self.find()

    def find(self) -> None:
        """Watch every class of environments that is not watched yet."""
        if self._patches is None:
            return
        watch_environments(self._patches, self._patched, lambda _, original: self._watching(original))

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watch, calls, listener, thread = self, self._calls, self._observation.listener, self._observation.thread_id

        def watched(*args: Any, **kwargs: Any) -> Any:
            if watch._is_inside or not calls.is_active or get_ident() != thread or calls.is_fetching:
                return original(*args, **kwargs)
            watch._is_inside = True
            if watch._observation.mode is Mode.DEEP:
                watch._observation.deep.environment_sites.add(watch._observation.sites.of_frame(sys._getframe(1)))
            listener.on_environment_start()
            try:
                return original(*args, **kwargs)
            finally:
                watch._is_inside = False
                listener.on_environment_end()

        return watched


def watch_environments(
    patches: Patches, watched: set[type], watching: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put `watching(name, method)` in the place of the methods by which a loop steps environments.

    Classes that are there now and not among the `watched` are patched, and added to them.
    """
    for module, name in _KINDS:
        base = getattr(sys.modules.get(module), name, None)
        for kind in _classes_under(base) if isinstance(base, type) else ():
            if kind not in watched:
                watched.add(kind)
                for method in _METHODS:
                    if callable(original := vars(kind).get(method)):
                        patches.set(kind, method, watching(method, original))


def _classes_under(base: type) -> Iterator[type]:
    yield base
    kinds: list[type] = type.__subclasses__(base)
    for kind in kinds:
        yield from _classes_under(kind)


COLLECTOR = CollectorEntry(EnvironmentSteps)
