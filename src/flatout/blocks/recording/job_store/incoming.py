"""Rows that wait in files of their own: each is written beside and renamed, so that no reader meets half of one."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from flatout.blocks.recording.job_store.rows import decoded_row, encoded_row
from flatout.core.errors import RecordError
from flatout.core.files import read_regular_file
from flatout.core.records.job import JobRecord

_ROW: Final = ".json"
_CLAIMED: Final = ".claimed"
_PART: Final = ".part"
_MOST_BYTES: Final = 4 << 20
"""A record has some kilobytes; a file may be anybody's."""
_ID: Final = re.compile(r"[\w-]{1,100}")


class IncomingRow(NamedTuple):
    """A file with a row, and the record in it."""

    path: Path
    record: JobRecord


class Incoming:
    """A folder with one file for each process that writes; safe for any number of writers, readers and gatherers at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, record: JobRecord) -> None:
        """Store a record in place of the one of the same id; when this returns no kill of the process can lose it.

        Raises RecordError when it cannot be written.
        """
        if not _ID.fullmatch(record.id):
            raise RecordError(f"the id {record.id[:80]!r} is no name of a file; use letters, digits, '-' and '_'")
        beside = self.folder / f".{record.id}.{secrets.token_hex(4)}{_PART}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_bytes(encoded_row(record))
                os.replace(beside, self.folder / f"{record.id}{_ROW}")
            except OSError:
                beside.unlink(missing_ok=True)
                raise
        except OSError as e:
            raise RecordError(f"cannot write a job to '{self.folder}': {e.strerror or e}") from e

    def rows(self, notes: list[str]) -> Iterator[IncomingRow]:
        """All rows that wait, those that somebody gathers now included; what cannot be read is named in `notes`.

        A row that is not here is where its gatherer has put it: only then its file goes.
        """
        done: set[Path] = set()
        is_whole = False
        while not is_whole:
            is_whole = True
            for path in [path for path in self._paths() if path not in done]:
                done.add(path)
                try:
                    yield IncomingRow(path, decoded_row(_read(path)))
                except FileNotFoundError:
                    is_whole = False  # gathered meanwhile, or claimed: then the next listing has it under another name
                except (OSError, RecordError) as e:
                    notes.append(f"'{path}' cannot be read: {e}")

    def claim(self, row: IncomingRow) -> IncomingRow | None:
        """Take a row away from its writer, which begins a new file if it writes again; None where another was quicker.

        Only for rows whose writers may come back: those of ended jobs are written no more, and stay until they are removed.
        """
        if row.path.suffix == _CLAIMED:
            return row
        claimed = row.path.with_name(f".{row.path.stem}.{secrets.token_hex(4)}{_CLAIMED}")
        try:
            os.rename(row.path, claimed)
            return IncomingRow(claimed, decoded_row(_read(claimed)))  # what was written since the listing
        except FileNotFoundError:
            return None
        except OSError as e:
            raise RecordError(f"cannot gather '{row.path}': {e.strerror or e}") from e

    def remove(self, row: IncomingRow) -> None:
        """Delete the file of a row, once that is stored elsewhere."""
        row.path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise RecordError(f"cannot list '{self.folder}': {e.strerror or e}") from e
        return [self.folder / name for name in sorted(names) if name.endswith((_ROW, _CLAIMED))]


def _read(path: Path) -> bytes:
    """The content of a file; on a network file system it may be replaced while it is opened, and is then opened again."""
    if path.stat().st_size > _MOST_BYTES:
        raise RecordError(f"it has more than {_MOST_BYTES >> 20} MiB")
    for _ in range(3):
        try:
            return read_regular_file(path)
        except OSError as e:
            if e.errno != errno.ESTALE:
                raise
    return read_regular_file(path)
