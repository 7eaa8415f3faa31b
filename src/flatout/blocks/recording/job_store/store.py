"""What every store of jobs can do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flatout.core.records.job import JobRecord


class StoredJobs(NamedTuple):
    """What a store holds: one record for each id, in the order of their beginnings."""

    jobs: tuple[JobRecord, ...]
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
    num_waiting: int = 0
    """Rows of ended jobs that lie in files of their own; tidying gathers them."""


class Tidied(NamedTuple):
    """What one run of tidying has done."""

    num_gathered: int
    num_removed: int
    notes: tuple[str, ...] = ()


class JobStore(Protocol):
    """Any number of processes may write, read and tidy at once; one that is killed loses nothing that `write` has stored."""

    def write(self, record: JobRecord) -> None:
        """Store a record in place of the one of the same id. Raises RecordError when it cannot be written."""

    def read(self, *, since_s: float = 0.0) -> StoredJobs:
        """The records written since a Unix time. Raises RecordError when the store cannot be read."""

    def tidy(self, *, now_s: float, remove_before_s: float | None = None) -> Tidied:
        """Put the store in order, and remove what was written before a Unix time."""
