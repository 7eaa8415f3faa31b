"""Where a supervised rank sits: what it was told when it was forked, and the marks by which it shows that it goes on."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

_ROW: Final = struct.Struct("<qqqd")
_ROW_BYTES: Final = 64
"""A cache line for each rank."""


class Mark(NamedTuple):
    """How far a rank has come in its epoch."""

    num_steps: int = 0
    """Optimizer steps, and other signs of life, so far."""
    reached: int = -1
    """The newest step that was given to `keep`; where it is kept in memory, the one before is safe by then."""
    resumed: int = -1
    """The step that it went on from; -1 while it has not asked."""
    first_s: float = 0.0
    """When its first step was done, on the machine's monotonic clock; 0 while it is not."""


class Marks:
    """A page that ranks of one node write and its zygote reads. Each writes its own row only."""

    def __init__(self, path: Path, num_rows: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_rows * _ROW_BYTES)
            self._page = mmap.mmap(descriptor, num_rows * _ROW_BYTES)
        finally:
            os.close(descriptor)

    def read(self, row: int) -> Mark:
        return Mark(*_ROW.unpack_from(self._page, row * _ROW_BYTES))

    def write(self, row: int, mark: Mark) -> None:
        _ROW.pack_into(self._page, row * _ROW_BYTES, *mark)


class Seat:
    """What a rank knows of its supervision. `advance`, `reach` and `resume` tell the supervisor how far it is."""

    def __init__(
        self, *, job: str, epoch: int, node: int, row: int, memory: Path, marks: Marks, restart_s: float | None
    ) -> None:
        self.job, self.epoch, self.node, self.memory = job, epoch, node, memory
        self.restart_s = restart_s
        """Seconds from a failure to the next step, as measured so far in this job."""
        self._row, self._marks, self._mark = row, marks, Mark()
        marks.write(row, self._mark)

    def advance(self) -> None:
        """A step is done, or something else that takes long goes on."""
        mark = self._mark
        self._write(mark._replace(num_steps=mark.num_steps + 1, first_s=mark.first_s or monotonic()))

    def reach(self, step: int) -> None:
        """So many steps of the training are done."""
        self._write(self._mark._replace(reached=step, num_steps=self._mark.num_steps + 1))

    def resume(self, step: int) -> None:
        """It goes on from there."""
        self._write(self._mark._replace(resumed=step))

    def _write(self, mark: Mark) -> None:
        self._mark = mark
        self._marks.write(self._row, mark)


_taken: list[Seat] = []


def take(seat: Seat) -> None:
    """Sit down: called once in each forked rank, before its script begins."""
    _taken[:] = [seat]


def seat() -> Seat | None:
    """That of this process; None where nobody supervises it."""
    return _taken[0] if _taken else None
