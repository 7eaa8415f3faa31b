"""Compositions in processes of their own: one that hangs, crashes or runs out of memory costs nothing but itself."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from flatout.core.errors import RecordError
from flatout.core.files import write_whole_file
from flatout.core.records.record import from_json, to_json
from flatout.core.records.shrink import Order, Tried
from flatout.core.secrets import redacted_text
from flatout.shrink.compose.explorer import Composition

_NUM_LAST_LINES: Final = 3
"""Last lines of a failed process that its message has."""


class SubprocessTrials:
    """Starts `command ORDER ANSWER` for each composition: both are files."""

    def __init__(self, order: Order, command: Sequence[str], *, limit_s: float) -> None:
        self._order, self._command, self._limit_s = order, [*command], limit_s

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        """What came of it; why not, where the process did not end well in time."""
        order = msgspec.structs.replace(
            self._order, composition=composition, allowed_loss=allowed_loss, trial_s=times * self._order.trial_s
        )
        return self._asked(order)

    def write_shrunk(self, composition: Composition, out: Path) -> Tried:
        """Have the composition written into a folder."""
        return self._asked(msgspec.structs.replace(self._order, composition=composition, out=str(out)))

    def why_not_writable(self) -> str:
        """Why the original model cannot be written as the order has it; '' where it can, or a pickle is allowed."""
        if self._order.allow_pickle:
            return ""
        return self._asked(msgspec.structs.replace(self._order, is_check=True)).because

    def _asked(self, order: Order) -> Tried:
        with tempfile.TemporaryDirectory(prefix="flatout-") as name:
            asked, answer = Path(name) / "order.json", Path(name) / "answer.json"
            write_whole_file(asked, to_json(order))
            try:
                ended = subprocess.run(
                    [*self._command, str(asked), str(answer)],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=self._limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Tried(because=f"it took more than {self._limit_s:.0f} s")
            try:
                return from_json(answer.read_bytes(), Tried)
            except (OSError, RecordError):
                return Tried(because=_why(ended.returncode, ended.stderr))


def _why(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.strip().splitlines() if line.strip()]
    how = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
    return f"its process {how}" + (f": {redacted_text(' | '.join(lines[-_NUM_LAST_LINES:]))}" if lines else "")
