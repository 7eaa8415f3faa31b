"""A store for the jobs of one machine: an SQLite file.

Rows that cannot go in now (another process has had it locked for seconds, or a later flatout has changed the table) wait in files
beside it, in `<name>.incoming/`.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Final, TypeVar

from flatout.blocks.recording.job_store.incoming import Incoming
from flatout.blocks.recording.job_store.rows import JOBS, ColumnKind, Row, Schema, latest, record_of, row_of
from flatout.blocks.recording.job_store.store import StoredJobs, Tidied
from flatout.core.errors import RecordError
from flatout.core.records.job import JobRecord

T = TypeVar("T")
_PATIENCE_S: Final = 10.0
"""How long a writer waits for others; 200 writers at once need a second or two."""
_TYPES: Final[dict[ColumnKind, str]] = {"text": "TEXT", "integer": "INTEGER", "real": "REAL", "json": "TEXT"}
_LOCKED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_own_random: Final = random.Random()
"""Not the stream that a training draws from."""


class SqliteStore:
    """The store in one file. `schema` is this flatout's; the first writer brings a file of an earlier one up to it."""

    def __init__(self, path: Path, *, schema: Schema = JOBS) -> None:
        self._path = path
        self._schema = schema
        self._incoming = Incoming(path.with_name(f"{path.name}.incoming"))

    def write(self, record: JobRecord) -> None:
        """Store a record in place of the one of the same id. Raises RecordError when that cannot be done, nor beside the file."""
        try:
            self._store([record])
        except _NotNow:
            self._incoming.write(record)

    def read(self, *, since_s: float = 0.0) -> StoredJobs:
        """The records written since a Unix time. Raises RecordError when the file is damaged or of a later version."""
        notes: list[str] = []
        waiting = [row.record for row in self._incoming.rows(notes) if row.record.written_s >= since_s]
        return StoredJobs(tuple(latest([*self._stored(since_s), *waiting])), tuple(notes), len(waiting))

    def tidy(self, *, now_s: float, remove_before_s: float | None = None) -> Tidied:
        """Take in what waits beside the file, and remove what was written before a Unix time; the file becomes smaller."""
        notes: list[str] = []
        taken = [claimed for row in self._incoming.rows(notes) if (claimed := self._incoming.claim(row)) is not None]
        try:
            self._store([row.record for row in taken])
            removed = 0
            if remove_before_s is not None:
                with self._writing() as database:
                    removed = database.execute("DELETE FROM jobs WHERE written_s < ?", (remove_before_s,)).rowcount
                with closing(self._opened()) as database:
                    _patiently(lambda: database.execute("VACUUM"))
        except _NotNow as e:
            raise RecordError(f"'{self._path}': {e}") from e
        for row in taken:
            self._incoming.remove(row)
        return Tidied(num_gathered=len(taken), num_removed=removed, notes=tuple(notes))

    # -- inside ---------------------------------------------------------------------------------------------------------------

    def _stored(self, since_s: float) -> list[JobRecord]:
        if not self._path.exists():
            return []
        try:
            with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                database.row_factory = sqlite3.Row
                database.execute("BEGIN")  # version and rows are of one moment
                version = _version_of(database)
                if not version:
                    if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        raise RecordError("it is a database of something else; give another path")
                    return []  # just being made
                found = database.execute("SELECT * FROM jobs WHERE written_s >= ?", (since_s,))
                return [record_of(self._schema.upgraded(dict(row), version)) for row in found]
        except (sqlite3.Error, RecordError) as e:
            raise RecordError(f"'{self._path}' cannot be read: {e}") from e

    def _store(self, records: Sequence[JobRecord]) -> None:
        if not records:
            return
        updated = ", ".join(f'"{c.name}" = excluded."{c.name}"' for c in self._schema.columns if c.name != "id")
        newer = f"ON CONFLICT (id) DO UPDATE SET {updated} WHERE excluded.revision >= jobs.revision"
        rows = [row_of(record) for record in records]
        with self._writing() as database:
            _insert(database, self._schema, rows, newer)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the present version of the table. Raises _NotNow where there cannot be one at present."""
        try:
            with closing(self._opened()) as database:
                _patiently(lambda: database.execute("BEGIN IMMEDIATE"))
                try:
                    self._bring_up(database)
                    yield database
                    _patiently(lambda: database.execute("COMMIT"))
                except BaseException:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                    raise
        except sqlite3.Error as e:
            raise RecordError(f"cannot write '{self._path}': {e}; give a path that can be written") from e

    def _opened(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise RecordError(f"cannot create the folder '{self._path.parent}': {e.strerror or e}") from e
        database = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
        # Readers never wait for writers then; NORMAL syncs at checkpoints, and no kill of a process can tear a row.
        _patiently(lambda: database.execute("PRAGMA journal_mode = WAL"))
        database.execute("PRAGMA synchronous = NORMAL")
        return database

    def _bring_up(self, database: sqlite3.Connection) -> None:
        """Create the table, or make that of an earlier version one of this version, within the transaction."""
        version = _version_of(database)
        if version == self._schema.version:
            return
        if version > self._schema.version:
            raise _NotNow(f"it is of version {version}, this flatout knows {self._schema.version}; update flatout")
        rows: list[Row] = []
        if version:
            columns = [one[1] for one in database.execute("PRAGMA table_info(jobs)")]
            stored = database.execute("SELECT * FROM jobs").fetchall()
            rows = [self._schema.upgraded(dict(zip(columns, row, strict=True)), version) for row in stored]
            database.execute("DROP TABLE jobs")
        elif database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise RecordError(f"'{self._path}' is a database of something else; give another path")
        _create(database, self._schema)
        _insert(database, self._schema, rows)
        database.execute(f"PRAGMA user_version = {self._schema.version}")


class _NotNow(Exception):
    """The row cannot go into the file at present; it waits beside it."""


def _create(database: sqlite3.Connection, schema: Schema) -> None:
    columns = ", ".join(
        f'"{column.name}" {_TYPES[column.kind]}{" PRIMARY KEY" if column.name == "id" else ""}'
        for column in schema.columns
    )
    database.execute(f"CREATE TABLE jobs ({columns})")
    database.execute("CREATE INDEX jobs_written ON jobs (written_s)")


def _insert(database: sqlite3.Connection, schema: Schema, rows: Sequence[Row], otherwise: str = "") -> None:
    names = [column.name for column in schema.columns]
    columns = ", ".join(f'"{name}"' for name in names)
    statement = f"INSERT INTO jobs ({columns}) VALUES ({', '.join('?' * len(names))}) {otherwise}"
    database.executemany(statement, [[row.get(name) for name in names] for row in rows])


def _version_of(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _patiently(action: Callable[[], T]) -> T:
    """Do something that others may be doing, and try again while they do. Raises _NotNow where they do not end."""
    end_s = monotonic() + _PATIENCE_S
    while True:
        try:
            return action()
        except sqlite3.OperationalError as e:
            if (e.sqlite_errorcode & 0xFF) not in _LOCKED:
                raise
            if monotonic() > end_s:
                raise _NotNow(f"others have had it locked for {_PATIENCE_S:.0f} s") from e
            sleep(_own_random.uniform(0.005, 0.05))
