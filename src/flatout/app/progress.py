"""One line at the bottom of the terminal that says how far an observation has come.

The script writes to the same terminal whenever it likes, so the line must be where the script's text never goes: the bottom
row is taken out of the scrolling region (DECSTBM, as apt does), and drawn with the cursor saved and restored. Each change is
one write, so that nothing of the script's comes in between.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO

from flatout.core.errors import RecordError

if TYPE_CHECKING:
    from flatout.core.records.progress import Progress

_EVERY_S: Final = 1.0
_FEWEST_ROWS: Final = 4
_SAVE, _RESTORE = "\x1b7", "\x1b8"


def progress_text(progress: Progress, *, waited_s: float = 0.0) -> str:
    """One line about how far an observation has come.

    >>> from flatout.core.records.progress import Progress
    >>> progress_text(Progress(doing="looking closely", num_steps=14, left_s=20.0))
    'flatout: looking closely, 14 steps, about 20 s left'
    """
    parts = [f"flatout: {progress.doing}"]
    if progress.num_steps:
        parts.append("1 step" if progress.num_steps == 1 else f"{progress.num_steps} steps")
    if progress.left_s is not None:
        left_s = max(0.0, progress.left_s - waited_s)
        left = f"{left_s:.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        parts.append("nearly done" if left_s < 1 else f"about {left} left")
    return ", ".join(parts)


class StatusLine:
    """Shows what the file at `path` says, from `with` to its end; call `update` now and then.

    Shows nothing where `terminal` is none, is too small, or knows no escape sequences.
    """

    def __init__(self, path: Path, terminal: TextIO, *, is_wanted: bool = True) -> None:
        from flatout.core.records.progress import Progress

        self._path = path
        self._terminal = terminal
        self._is_shown = is_wanted and terminal.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._size = os.terminal_size((0, 0))
        self._drawn_s = 0.0
        self._progress = Progress(doing="starting")
        self._since_s = monotonic()

    def __enter__(self) -> StatusLine:
        self.update()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def update(self) -> None:
        """Draw the line anew, once a second at most."""
        now_s = monotonic()
        if not self._is_shown or now_s - self._drawn_s < _EVERY_S:
            return
        self._drawn_s = now_s
        self._read(now_s)
        size = self._terminal_size()
        if size.lines < _FEWEST_ROWS:
            return
        text = progress_text(self._progress, waited_s=now_s - self._since_s)[: size.columns - 1]
        reserve = self._reserve(size) if size != self._size else ""
        self._write(f"{reserve}{_SAVE}\x1b[{size.lines};1H\x1b[2K\x1b[2m{text}\x1b[0m{_RESTORE}")

    def close(self) -> None:
        """Erase the line and give its row back; then nothing is shown any more."""
        if self._is_shown and self._size.lines:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H\x1b[2K{_RESTORE}")
        self._is_shown = False

    def _reserve(self, size: os.terminal_size) -> str:
        """Keep scrolling above the bottom row.

        A step down (IND, which keeps the column) and up make sure that the cursor is not on it; setting the region moves the
        cursor home, so it is saved. After a change of the window's size the old row may be anywhere; it stays as it is.
        """
        self._size = size
        return f"\x1bD\x1b[1A{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}"

    def _read(self, now_s: float) -> None:
        from flatout.core.records.progress import Progress
        from flatout.core.records.record import from_json

        try:
            progress = from_json(self._path.read_bytes(), Progress)
        except (OSError, RecordError):
            return
        if progress != self._progress:
            self._progress, self._since_s = progress, now_s

    def _terminal_size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._terminal.fileno())
        except OSError:
            return shutil.get_terminal_size()

    def _write(self, text: str) -> None:
        try:
            os.write(self._terminal.fileno(), text.encode("ascii", "replace"))
        except OSError:  # the terminal went away; the observation goes on
            self._is_shown = False
