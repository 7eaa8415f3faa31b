"""A job's record as a row of a table, and the row's schema with its migrations."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from flatout.core.errors import RecordError
from flatout.core.records.job import JobRecord
from flatout.core.records.record import decode_json

Row = dict[str, object]
ColumnKind = Literal["text", "integer", "real", "json"]
Migration = Callable[[Row], Row]


class TableColumn(NamedTuple):
    """A column of the table; what is no text and no number is stored as JSON."""

    name: str
    kind: ColumnKind


class Schema(NamedTuple):
    """The columns of a table, and how rows of earlier versions become rows of this one: one function for each version."""

    columns: tuple[TableColumn, ...]
    migrations: tuple[Migration, ...] = ()

    @property
    def version(self) -> int:
        """The number that stores have; 1 is the first."""
        return 1 + len(self.migrations)

    def upgraded(self, row: Mapping[str, object], version: int) -> Row:
        """The row of an earlier version as one of this version.

        Raises RecordError when it is of a later one.
        """
        if not 1 <= version <= self.version:
            raise RecordError(
                f"it has version {version} of the jobs' table, and this flatout knows 1 to {self.version}; update flatout"
            )
        found = dict(row)
        for migration in self.migrations[version - 1 :]:
            found = migration(found)
        return found


def _kind_of(annotation: object) -> ColumnKind:
    options = set(get_args(annotation)) - {type(None)} if get_origin(annotation) in (Union, types.UnionType) else set()
    one = next(iter(options)) if len(options) == 1 else annotation
    if get_origin(one) is Literal:
        return "text"
    names: dict[object, ColumnKind] = {str: "text", int: "integer", float: "real"}
    return names.get(one, "json")


JOBS: Final = Schema(tuple(TableColumn(name, _kind_of(kind)) for name, kind in get_type_hints(JobRecord).items()))
"""The table of jobs: a column for each field of a JobRecord."""


def row_of(record: JobRecord) -> Row:
    """The record as text and numbers; nested fields as JSON."""
    return {
        column.name: msgspec.json.encode(value).decode() if column.kind == "json" else value
        for column in JOBS.columns
        for value in (getattr(record, column.name),)
    }


def record_of(row: Mapping[str, object]) -> JobRecord:
    """The record in a row of the present version; columns that no field has are left out, missing ones get their defaults.

    Raises RecordError when a value does not fit its field.
    """
    found: Row = {}
    for name, kind in JOBS.columns:
        value = row.get(name)
        if kind == "json" and isinstance(value, str):
            value = decode_json(value, object)
        if value is not None:
            found[name] = value
    try:
        return msgspec.convert(found, JobRecord)
    except msgspec.ValidationError as e:
        raise RecordError(f"a row of the jobs' table does not fit: {e}") from e


class WrittenRow(msgspec.Struct, frozen=True):
    """A row in a file of its own, with the version of the table that it was written for."""

    version: int
    row: Row


def encoded_row(record: JobRecord) -> bytes:
    """The record as the content of a file of its own."""
    return msgspec.json.encode(WrittenRow(JOBS.version, row_of(record)))


def decoded_row(data: bytes, schema: Schema = JOBS) -> JobRecord:
    """The record in such a file. Raises RecordError when it is damaged or of a later version."""
    written = decode_json(data, WrittenRow)
    return record_of(schema.upgraded(written.row, written.version))


def latest(records: list[JobRecord]) -> list[JobRecord]:
    """One record for each id, the one that was written last, in the order of their beginnings."""
    found: dict[str, JobRecord] = {}
    for record in records:
        other = found.get(record.id)
        if other is None or (record.revision, record.written_s) > (other.revision, other.written_s):
            found[record.id] = record
    return sorted(found.values(), key=lambda r: (r.began_s, r.id))
