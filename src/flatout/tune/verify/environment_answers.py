"""What the environments of reinforcement learning answered, recorded in one run and given again in others.

A simulation that is fed back makes other states of differences in the last digits within a rollout: nothing could be compared.
With the answers of the first run every other run sees the same observations and rewards, as it sees the same batches.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, Final

from flatout.check.observe.collectors.environments import watch_environments
from flatout.core.runtime.cache_folder import require_trusted_library
from flatout.core.runtime.patches import Patches

FILE: Final = "environment.pickle"
"""In the folder of recorded steps."""


class Rollouts:
    """How many steps of training lie between two rollouts, by how often environments were called until each step's end."""

    def __init__(self) -> None:
        self.cycle = 0
        """Steps from the last rollout but one to the last; 0 before the second."""
        self._num_calls = 0
        self._num_since: int | None = None

    def add_step(self, num_calls: int) -> None:
        """A step has ended, with so many calls of environments since the start."""
        if num_calls > self._num_calls:
            self.cycle = self._num_since or 0
            self._num_calls, self._num_since = num_calls, 0
        if self._num_since is not None:
            self._num_since += 1


class EnvironmentAnswers:
    """Watches `step` and `reset` of the outermost environments on the thread that has made it.

    While `is_wanted`, their answers are collected; or those of `replayed` take their place as long as the calls are the same, and
    the environments step all the same. `on_action` gets what each call was given.
    """

    def __init__(
        self, *, replayed: Path | None, is_wanted: Callable[[], bool], on_action: Callable[[Any], None]
    ) -> None:
        self.num_calls = 0
        self._is_wanted = is_wanted
        self._on_action = on_action
        self._replayed: list[tuple[str, bytes]] | None = None
        if replayed is not None:
            require_trusted_library(replayed)  # a pickle: of our own processes, in a folder that is ours alone
            self._replayed = pickle.loads(replayed.read_bytes())
        self._recorded: list[tuple[str, bytes]] = []
        self._is_complete = True
        """Whether all answers so far could be recorded, or given."""
        self._patches: Patches | None = None
        self._patched: set[type] = set()
        self._is_inside = False
        self._thread_id = get_ident()

    def install(self, patches: Patches) -> None:
        """Watch environments from now on; `find` watches those whose classes are defined later."""
        self._patches = patches
        self.find()

    def find(self) -> None:
        """Watch all classes of environments that are not watched yet."""
        if self._patches is None:
            return
        watch_environments(self._patches, self._patched, self._watching)

    def write(self, folder: Path) -> None:
        """Write the answers into this folder, if there are any and all of them could be recorded."""
        if not self._recorded or not self._is_complete or self._replayed is not None:
            return
        beside = folder / f"{FILE}.{os.getpid()}.part"
        beside.write_bytes(pickle.dumps(self._recorded))
        os.replace(beside, folder / FILE)
        self._recorded = []

    def _watching(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or get_ident() != self._thread_id:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                answer = original(*args, **kwargs)
            finally:
                self._is_inside = False
            self.num_calls += 1
            if not self._is_wanted():
                return answer
            if method in ("step", "step_async"):
                self._on_action((args[1:], kwargs))
            return self._exchanged(method, answer)

        return watched

    def _exchanged(self, method: str, answer: Any) -> Any:
        """The answer that this call has in all runs."""
        if not self._is_complete:
            return answer
        try:
            if self._replayed is None:
                self._recorded.append((method, pickle.dumps(answer)))
                return answer
            position = len(self._recorded)
            name, data = self._replayed[position]
            if name != method:
                raise LookupError(method)
            self._recorded.append((name, b""))
            return pickle.loads(data)
        except (LookupError, pickle.PickleError, TypeError, AttributeError):
            self._is_complete = False
            return answer
