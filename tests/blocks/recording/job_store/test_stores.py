from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow.parquet as parquet
import pytest
from tests.fleet_jobs import NOW_S, fleet, job

from flatout.blocks.recording.job_store import opening
from flatout.blocks.recording.job_store.folder import FolderStore
from flatout.blocks.recording.job_store.opening import default_store, open_store
from flatout.blocks.recording.job_store.parquet import write_parquet
from flatout.blocks.recording.job_store.rows import JOBS, Schema, TableColumn
from flatout.blocks.recording.job_store.sqlite import SqliteStore
from flatout.blocks.recording.job_store.store import JobStore
from flatout.core.errors import RecordError, UsageError
from flatout.core.records.job import JobRecord

DAY_S = 86400.0


def by_id(records: Iterable[JobRecord]) -> dict[str, JobRecord]:
    return {record.id: record for record in records}


@pytest.fixture(params=["fleet.sqlite", "fleet"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> JobStore:
    return open_store(tmp_path / request.param)


def test_what_is_written_is_read_once_for_each_id(store: JobStore) -> None:
    jobs = fleet(30)
    for record in jobs:
        store.write(record)
    changed = msgspec.structs.replace(jobs[0], revision=7, num_steps=1)
    store.write(changed)

    found = store.read()

    assert not found.notes
    assert len(found.jobs) == 30
    assert by_id(found.jobs) == by_id([changed, *jobs[1:]])


def test_a_store_without_jobs_has_none(store: JobStore) -> None:
    assert store.read().jobs == ()
    assert store.tidy(now_s=NOW_S) == (0, 0, ())


def test_only_what_was_written_since_a_time_is_read(store: JobStore) -> None:
    old, new = job(1, began_s=NOW_S - 9 * DAY_S), job(2, began_s=NOW_S - DAY_S)
    store.write(old)
    store.write(new)

    for _ in range(2):
        assert store.read(since_s=NOW_S - 2 * DAY_S).jobs == (new,)
        assert store.read().jobs == (old, new)
        store.tidy(now_s=NOW_S)


def test_tidying_changes_no_job_and_removes_what_is_too_old(store: JobStore) -> None:
    jobs = fleet(40)
    running = job(99, outcome="running", began_s=NOW_S - 3600.0)
    for record in (*jobs, running):
        store.write(record)
    before = store.read().jobs

    store.tidy(now_s=NOW_S)
    assert store.read().jobs == before
    assert store.read().num_waiting == 0

    limit_s = NOW_S - 5 * DAY_S
    removed = store.tidy(now_s=NOW_S, remove_before_s=limit_s).num_removed
    assert store.read().jobs == tuple(r for r in before if r.written_s >= limit_s)
    assert removed == sum(r.written_s < limit_s for r in before) > 0
    assert running in store.read().jobs


def test_a_job_that_writes_again_after_it_was_gathered_counts_as_it_is_now(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    suspended = job(1, outcome="running", revision=4, began_s=NOW_S - 3 * DAY_S)
    store.write(suspended)
    assert store.tidy(now_s=NOW_S).num_gathered == 1
    resumed = msgspec.structs.replace(suspended, revision=5, written_s=NOW_S)
    store.write(resumed)

    assert store.read().jobs == (resumed,)
    store.tidy(now_s=NOW_S)
    assert store.read().jobs == (resumed,)


def test_many_parquet_files_become_one(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    jobs = fleet(70)
    for i, record in enumerate(jobs):
        write_parquet(tmp_path / "jobs" / f"{i:03}.parquet", [record])

    store.tidy(now_s=NOW_S)

    assert len(list((tmp_path / "jobs").glob("*"))) == 1
    assert by_id(store.read().jobs) == by_id(jobs)


def test_who_is_killed_between_storing_and_deleting_leaves_a_row_in_two_places_that_counts_once(tmp_path: Path) -> None:
    store, record = FolderStore(tmp_path), job(1)
    store.write(record)
    write_parquet(tmp_path / "jobs" / "a.parquet", [record])

    assert store.read().jobs == (record,)


def test_a_damaged_row_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    store, record = FolderStore(tmp_path), job(1)
    store.write(record)
    (tmp_path / "incoming" / "broken.json").write_bytes(b'{"version": 1, "row": {')

    found = store.read()

    assert found.jobs == (record,)
    assert len(found.notes) == 1
    assert "broken.json" in found.notes[0]
    store.tidy(now_s=NOW_S)
    assert (tmp_path / "incoming" / "broken.json").exists()  # it is nobody's to delete


def test_a_parquet_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "other.parquet").write_bytes(b"PAR1 and nothing")

    with pytest.raises(RecordError, match=r"other\.parquet"):
        FolderStore(tmp_path).read()


def test_other_programs_find_a_column_for_each_field(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", fleet(5))

    table = parquet.read_table(tmp_path / "a.parquet")

    assert set(table.column_names) == set(JobRecord.__struct_fields__)
    assert str(table.schema.field("step_s").type) == "double"


def test_an_id_that_is_no_name_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no name of a file"):
        FolderStore(tmp_path).write(msgspec.structs.replace(job(), id="../../etc/x"))


# -- SQLite -------------------------------------------------------------------------------------------------------------------


def renamed(row: dict[str, object]) -> dict[str, object]:
    return {("name" if key == "script" else key): value for key, value in row.items()}


BEFORE = Schema(tuple(TableColumn("script" if c.name == "name" else c.name, c.kind) for c in JOBS.columns))
AFTER = Schema(JOBS.columns, (renamed,))


def old_file(path: Path, records: list[JobRecord]) -> None:
    """A file as a flatout wrote it that called the column of the name otherwise."""
    SqliteStore(path).write(records[0])
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE jobs RENAME COLUMN name TO script")
    database.close()


def test_a_file_of_an_earlier_version_is_read_as_it_is_and_changed_by_the_first_writer(tmp_path: Path) -> None:
    path, old, new = tmp_path / "a.sqlite", job(1, name="old.py"), job(2, name="new.py")
    old_file(path, [old])
    store = SqliteStore(path, schema=AFTER)

    before = path.read_bytes()
    assert store.read().jobs == (old,)
    assert path.read_bytes() == before

    store.write(new)
    assert by_id(store.read().jobs) == by_id([old, new])
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
        assert database.execute("SELECT count(*) FROM jobs WHERE name = 'old.py'").fetchone() == (1,)
    database.close()


def test_a_flatout_older_than_the_file_leaves_its_rows_beside_it(tmp_path: Path) -> None:
    path, one, two = tmp_path / "a.sqlite", job(1), job(2)
    SqliteStore(path, schema=AFTER).write(one)

    SqliteStore(path).write(two)  # of version 1

    with pytest.raises(RecordError, match="update flatout"):
        SqliteStore(path).read()
    newer = SqliteStore(path, schema=AFTER)
    assert by_id(newer.read().jobs) == by_id([one, two])
    assert newer.read().num_waiting == 1
    assert newer.tidy(now_s=NOW_S).num_gathered == 1
    assert by_id(newer.read().jobs) == by_id([one, two])
    assert newer.read().num_waiting == 0


def test_while_others_lock_the_file_rows_go_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sqlite"
    store = SqliteStore(path)
    store.write(job(1))
    monkeypatch.setattr("flatout.blocks.recording.job_store.sqlite._PATIENCE_S", 0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    store.write(job(2))

    other.execute("ROLLBACK")
    other.close()
    assert len(store.read().jobs) == 2
    store.tidy(now_s=NOW_S)
    assert len(store.read().jobs) == 2


def test_a_row_that_comes_late_does_not_replace_a_later_one(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.sqlite")
    store.write(job(1, revision=7))
    store.write(job(1, revision=3))

    assert store.read().jobs == (job(1, revision=7),)


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    database.close()
    before = path.read_bytes()

    for action in (lambda: SqliteStore(path).write(job()), lambda: SqliteStore(path).read()):
        with pytest.raises(RecordError, match="something else"):
            action()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    database.close()
    assert len(before) == len(path.read_bytes())


def test_a_file_that_is_no_database_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"not a database, and longer than its header would be" * 10)

    with pytest.raises(RecordError, match=r"a\.sqlite"):
        SqliteStore(path).read()


# -- opening ------------------------------------------------------------------------------------------------------------------


def test_the_kind_of_store_follows_from_its_name(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path / "a.sqlite"), SqliteStore)
    assert isinstance(open_store(tmp_path / "a.db"), SqliteStore)
    assert isinstance(open_store(tmp_path / "fleet"), FolderStore)


def test_sqlite_on_storage_of_many_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_file_system", lambda path: "nfs4")

    with pytest.raises(UsageError, match=r"nfs4.*give a folder"):
        open_store(tmp_path / "a.sqlite")
    open_store(tmp_path / "fleet")


def test_a_path_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").mkdir()
    (tmp_path / "b").write_text("")

    with pytest.raises(UsageError, match="is a folder"):
        open_store(tmp_path / "a.sqlite")
    with pytest.raises(UsageError, match="is a file"):
        open_store(tmp_path / "b")


def test_the_usual_store_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_store() == tmp_path / "flatout" / "fleet.sqlite"
    monkeypatch.setattr(opening, "_file_system", lambda path: "nfs")
    assert default_store() == tmp_path / "flatout" / "fleet"
    monkeypatch.setattr(opening, "_file_system", lambda path: "ext4")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_store() == Path.home() / ".local" / "share" / "flatout" / "fleet.sqlite"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RecordError, match="cannot write"):
        open_store(tmp_path / "fleet").write(job())
