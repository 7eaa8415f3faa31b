"""What a further collector looks like to the observer: it watches from install to remove, and is told of close looks."""

from __future__ import annotations

from typing import Protocol

from flatout.profiling.patching import Patches
from flatout.profiling.schedule import Mode


class Collector(Protocol):
    """Gathers one kind of evidence beside the step machinery. All calls come from the observed thread.

    `begin` and `end` are called at the borders of every step that is not plain light observation or unwatched, before the
    step's clock starts and after it has stopped; what they take counts as the cost of close looks. An error raised here ends
    the observation, never the script.
    """

    def install(self, patches: Patches) -> None:
        """Put watches in place."""

    def begin(self, mode: Mode) -> None:
        """A step in this mode begins."""

    def end(self, mode: Mode) -> None:
        """The step in this mode ended."""

    def remove(self) -> None:
        """Take away what `patches` does not restore."""
