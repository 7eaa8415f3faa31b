"""Whether a training that keeps its state makes steps, seen from outside: each step touches its folder in memory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from flatout.blocks.elastic.launched import PREFIX

_FIRST: Final = 1
"""The process that a container was started with."""


class Life(NamedTuple):
    """Seconds since the last step of any training of this user here, None where there was none; and since the start."""

    step_ago_s: float | None
    start_ago_s: float

    def is_alive(self, *, within_s: float, start_s: float) -> bool:
        """Whether a step was done within so many seconds, or may still be awaited after the start."""
        return self.start_ago_s <= start_s or (self.step_ago_s is not None and self.step_ago_s <= within_s)

    def text(self) -> str:
        """Say both numbers in words, for a log.

        >>> Life(None, 3.0).text()
        'no step yet, 3 s after the start'
        """
        began = f"{self.start_ago_s:.0f} s after the start"
        return (
            f"no step yet, {began}"
            if self.step_ago_s is None
            else f"the last step {self.step_ago_s:.0f} s ago, {began}"
        )


def life_of(memory: Path) -> Life:
    """The life of trainings whose copies lie in that folder; the start is that of the container, or the machine."""
    now, last = time.time(), None  # noqa: TID251  # files have the wall clock's time
    for folder in memory.glob(f"{PREFIX}*"):
        with suppress(OSError):
            there = folder.lstat()
            if there.st_uid == os.getuid():
                last = max(last or 0.0, there.st_mtime)
    return Life(None if last is None else max(0.0, now - last), _age_s(_FIRST))


def _age_s(pid: int) -> float:
    """Seconds since a process began (proc(5), stat)."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
