from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fleet_jobs import finding, job

from flatout.blocks.recording.job_store.rows import (
    JOBS,
    Schema,
    TableColumn,
    decoded_row,
    encoded_row,
    latest,
    record_of,
    row_of,
)
from flatout.core.errors import RecordError
from flatout.core.records.job import NodeHealth

TEXT = st.text(max_size=40)
FRACTION = st.floats(0.0, 1.0)


@st.composite
def records(draw: st.DrawFn) -> object:
    gains = draw(st.lists(st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 9.0)), max_size=3))
    return job(
        draw(st.integers(0, 10**6)),
        revision=draw(st.integers(0, 10**9)),
        command=draw(TEXT),
        error=draw(TEXT),
        step_s=draw(st.none() | st.floats(1e-6, 1e4)),
        num_steps=draw(st.integers(0, 1 << 60)),
        mfu=draw(st.none() | FRACTION),
        phases=draw(st.dictionaries(TEXT, FRACTION, max_size=4)),
        findings=tuple(finding((1.0, high), because=draw(TEXT)) for _, high in gains),
        health=NodeHealth(
            num_samples=3, throttled_fraction=draw(st.none() | FRACTION), ecc_errors=draw(st.none() | st.just(0))
        ),
    )


@given(records())
def test_a_record_comes_back_from_its_row_and_from_its_file(record: object) -> None:
    assert record_of(row_of(record)) == record
    assert decoded_row(encoded_row(record)) == record


def test_rows_hold_text_numbers_and_json_alone() -> None:
    kinds = {column.name: column.kind for column in JOBS.columns}

    assert kinds["id"] == kinds["outcome"] == "text"
    assert kinds["num_gpus"] == kinds["memory_bytes"] == "integer"
    assert kinds["step_s"] == kinds["began_s"] == "real"
    assert kinds["findings"] == kinds["health"] == kinds["phases"] == "json"
    assert all(isinstance(value, str | int | float | None) for value in row_of(job()).values())


def test_a_row_of_an_earlier_version_goes_through_each_migration() -> None:
    schema = Schema(
        (TableColumn("id", "text"), TableColumn("seconds", "real")),
        (
            lambda row: {**row, "seconds": row["minutes"] * 60},  # type: ignore[operator]
            lambda row: {k: v for k, v in row.items() if k != "minutes"},
        ),
    )

    assert schema.version == 3
    assert schema.upgraded({"id": "a", "minutes": 2}, 1) == {"id": "a", "seconds": 120}
    assert schema.upgraded({"id": "a", "seconds": 5}, 3) == {"id": "a", "seconds": 5}


def test_a_row_of_a_later_version_is_refused() -> None:
    data = msgspec.json.encode({"version": JOBS.version + 1, "row": row_of(job())})

    with pytest.raises(RecordError, match="update flatout"):
        decoded_row(data)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"version": 1, "row": {"id": 3}}', b'{"version": "x", "row": {}}']
)
def test_a_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decoded_row(data)


def test_columns_that_no_field_has_are_left_out_and_missing_ones_are_usual() -> None:
    row = row_of(job(step_s=0.5))
    row["of_the_future"] = 1
    del row["mfu"], row["findings"]

    found = record_of(row)

    assert (found.mfu, found.findings, found.step_s) == (None, (), 0.5)


def test_of_two_records_with_one_id_the_later_counts() -> None:
    older, newer, other = job(1, revision=1), job(1, revision=2), job(2, revision=1)

    assert latest([newer, other, older]) == latest([older, newer, other])
    assert {record.revision for record in latest([newer, older])} == {2}
    assert len(latest([newer, other, older])) == 2
