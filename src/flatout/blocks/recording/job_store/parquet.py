"""Jobs in Parquet files, one column for each field, so that other programs can query them, too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flatout.blocks.recording.job_store.rows import JOBS, ColumnKind, Schema, record_of, row_of
from flatout.core.errors import RecordError
from flatout.core.records.job import JobRecord

_VERSION: Final = b"flatout.jobs.version"
_MOST_BYTES: Final = 3 << 30
_MOST_PACKED: Final = 200
"""Limits of what a file may unpack to, which somebody else may have written: in all, and as a multiple of its size."""


def write_parquet(path: Path, records: Sequence[JobRecord]) -> None:
    """Write a file whole or not at all: beside, to the disk, then renamed. Raises RecordError when it cannot be written."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    types: dict[ColumnKind, Any] = {
        "text": arrow.string(),
        "integer": arrow.int64(),
        "real": arrow.float64(),
        "json": arrow.string(),
    }
    schema = arrow.schema(
        [(column.name, types[column.kind]) for column in JOBS.columns], metadata={_VERSION: str(JOBS.version)}
    )
    table = arrow.Table.from_pylist([row_of(record) for record in records], schema=schema)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                parquet.write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise RecordError(f"cannot write '{path}': {e.strerror or e}") from e


def read_parquet(path: Path, since_s: float, schema: Schema = JOBS) -> list[JobRecord]:
    """The records of a file that were written since a Unix time.

    Raises:
        FileNotFoundError: It is gone.
        RecordError: It is damaged, no file of jobs, or of a later version.
    """
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            version = int((file.schema_arrow.metadata or {}).get(_VERSION, b"0"))
            if not version:
                raise RecordError("it holds no jobs of flatout")
            unpacked = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            if unpacked > min(_MOST_BYTES, _MOST_PACKED * path.stat().st_size + (1 << 20)):
                raise RecordError(f"it would unpack to {unpacked >> 20} MiB")
            rows = file.read()
    except FileNotFoundError:
        raise
    except (OSError, ValueError, arrow.ArrowException, RecordError) as e:
        raise RecordError(f"'{path}' cannot be read: {e}") from e
    times = rows.column("written_s").to_pylist() if since_s > 0 and "written_s" in rows.column_names else ()
    if times:
        rows = rows.take([i for i, written_s in enumerate(times) if written_s is None or written_s >= since_s])
    columns = {name: rows.column(name).to_pylist() for name in rows.column_names}
    try:
        return [
            record_of(schema.upgraded(dict(zip(columns, values, strict=True)), version))
            for values in zip(*columns.values(), strict=True)
        ]
    except RecordError as e:
        raise RecordError(f"'{path}' cannot be read: {e}") from e
