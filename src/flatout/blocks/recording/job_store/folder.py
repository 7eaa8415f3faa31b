"""A store that many machines share: a folder with rows in files of their own, gathered into Parquet files.

Writers replace one small file each; nothing is locked, since locks of network file systems cannot be relied on. Gathering moves
ended jobs into a Parquet file, and deletes their files once that is on the disk, so that whoever is killed at any moment leaves
each row in at least one place. Rows that are in two are counted once, by their ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from flatout.blocks.recording.job_store.incoming import Incoming, IncomingRow
from flatout.blocks.recording.job_store.parquet import read_parquet, write_parquet
from flatout.blocks.recording.job_store.rows import latest
from flatout.blocks.recording.job_store.store import StoredJobs, Tidied
from flatout.core.errors import RecordError
from flatout.core.records.job import JobRecord

GONE_S: Final = 24 * 3600.0
"""A running job that has written nothing for so long is gathered like one that ended."""
_MOST_FILES: Final = 60
"""Parquet files, above which tidying makes one of them: each costs a reader some milliseconds."""
_ATTEMPTS: Final = 5


class FolderStore:
    """The store in a folder: `incoming/` has rows that wait, `jobs/` the Parquet files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = Incoming(folder / "incoming")

    def write(self, record: JobRecord) -> None:
        """Store a record in place of the one of the same id. Raises RecordError when it cannot be written."""
        self._incoming.write(record)

    def read(self, *, since_s: float = 0.0) -> StoredJobs:
        """The records written since a Unix time.

        Raises RecordError when a Parquet file was written by a later flatout, or the package is missing that reads them.
        """
        notes: list[str] = []
        waiting = [row.record for row in self._incoming.rows(notes)]
        # Then the files: a row that is gathered in between is in both.
        records = [r for r in (*self._gathered(since_s), *waiting) if r.written_s >= since_s]
        num_waiting = sum(not r.is_running for r in waiting)
        return StoredJobs(tuple(latest(records)), tuple(notes), num_waiting)

    def tidy(self, *, now_s: float, remove_before_s: float | None = None) -> Tidied:
        """Gather the rows of ended jobs into a Parquet file, and remove those written before a Unix time.

        May run at any time, also several times at once.
        """
        notes: list[str] = []
        taken: list[IncomingRow] = []
        for row in self._incoming.rows(notes):
            if not row.record.is_running:
                taken.append(row)
            elif row.record.written_s < now_s - GONE_S and (claimed := self._incoming.claim(row)) is not None:
                taken.append(claimed)
        files = self._files()
        is_many = len(files) >= _MOST_FILES
        has_old = [
            path
            for path in files
            if remove_before_s is not None and any(r.written_s < remove_before_s for r in read_parquet(path, 0.0))
        ]
        rewritten = files if is_many else has_old
        before = [record for path in rewritten for record in read_parquet(path, 0.0)]
        records = latest([*before, *(row.record for row in taken)])
        remaining = [r for r in records if remove_before_s is None or r.written_s >= remove_before_s]
        if remaining:
            day = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%d-%H%M%S")
            write_parquet(self._folder / "jobs" / f"{day}-{secrets.token_hex(4)}.parquet", remaining)
        for path in rewritten:
            path.unlink(missing_ok=True)
        for row in taken:
            self._incoming.remove(row)
        return Tidied(num_gathered=len(taken), num_removed=len(records) - len(remaining), notes=tuple(notes))

    def _files(self) -> list[Path]:
        return sorted((self._folder / "jobs").glob("[!.]*.parquet"))

    def _gathered(self, since_s: float) -> Sequence[JobRecord]:
        for _ in range(_ATTEMPTS):
            try:
                return [record for path in self._files() for record in read_parquet(path, since_s)]
            except FileNotFoundError:
                continue  # files were put together meanwhile: list them again
        raise RecordError(f"the files in '{self._folder / 'jobs'}' change all the time; try again")
