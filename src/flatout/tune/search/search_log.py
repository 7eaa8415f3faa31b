"""Everything that was tried for a script, one line each, on disk as soon as it is known: a search that was stopped goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flatout.core.errors import PlanError, RecordError
from flatout.core.files import read_regular_file, write_whole_file
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Attempt
from flatout.core.records.record import from_json


class SearchLog:
    """Attempts in a file of JSON lines, or in memory alone when there is no path.

    A last line that was cut off when the search was killed is dropped; any other line that cannot be read is an error.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.attempts: list[Attempt] = []
        self._path = path
        if path is not None and path.exists():
            self.attempts = _read(path)
            # whole lines only, so that the next one starts on its own
            write_whole_file(path, b"".join(msgspec.json.encode(a) + b"\n" for a in self.attempts))

    def find(self, kind: str, before: Sequence[PlannedLever], after: Sequence[PlannedLever]) -> Attempt | None:
        """The attempt of this kind on these levers, if there is one."""
        key = (kind, lever_key(before), lever_key(after))
        return next((a for a in self.attempts if (a.kind, lever_key(a.before), lever_key(a.after)) == key), None)

    def add(self, attempt: Attempt) -> None:
        """Save an attempt, on disk before anything else happens."""
        self.attempts.append(attempt)
        if self._path is not None:
            with open(self._path, "ab") as file:
                file.write(msgspec.json.encode(attempt) + b"\n")
                file.flush()
                os.fsync(file.fileno())


def lever_key(levers: Sequence[PlannedLever]) -> tuple[tuple[str, str], ...]:
    """What tells two lists of levers apart: ids and parameters, in order."""
    return tuple((p.id, msgspec.json.encode(p.parameters, order="sorted").decode()) for p in levers)


def _read(path: Path) -> list[Attempt]:
    try:
        data = read_regular_file(path)
    except OSError as e:
        raise PlanError(f"cannot read the search log '{path}': {e.strerror or e}; delete it to start anew") from e
    lines = data.split(b"\n")
    attempts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            attempts.append(from_json(line, Attempt))
        except RecordError as e:
            if number == len(lines):  # written when the process was killed
                break
            raise PlanError(
                f"line {number} of the search log '{path}' cannot be read: {e}; delete the file to start anew"
            ) from e
    return attempts
