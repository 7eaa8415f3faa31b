"""Shows other processes how far the observation has come, through a small file that is renamed over the one before."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Final

from flatout.core.errors import RecordError
from flatout.core.files import write_whole_file
from flatout.core.records.progress import Doing, Progress
from flatout.core.records.record import to_json

_EVERY_S: Final = 0.5
"""A write takes some 0.1 ms: at this distance 0.02 % of the time, and it lies between the steps."""


class ProgressFile:
    """`own_s` is the time that writing has taken. A file that cannot be written ends the writing, nothing else."""

    def __init__(self, path: Path) -> None:
        self.own_s = 0.0
        self._path = path
        self._last_s = 0.0
        self._is_broken = False

    def is_due(self, now_s: float) -> bool:
        """Whether the last word is old enough; `now_s` is a `perf_counter`."""
        return now_s - self._last_s >= _EVERY_S and not self._is_broken

    def write(self, doing: Doing, *, num_steps: int = 0, left_s: float | None = None) -> None:
        """Write the progress to the file now, whether it is due or not."""
        self._last_s = perf_counter()
        try:
            write_whole_file(self._path, to_json(Progress(doing=doing, num_steps=num_steps, left_s=left_s)))
        except RecordError:
            self._is_broken = True
        self.own_s += perf_counter() - self._last_s
