"""The report for programs, and the way back."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.core.errors import RecordError
from flatout.core.records.evidence import SCHEMA_VERSION, Evidence
from flatout.core.records.finding import Diagnosis, RankedFinding
from flatout.core.records.record import to_json
from flatout.report.json_report import JsonReport, json_report, read_evidence


def test_the_report_gives_its_evidence_back(evidence: Evidence, diagnosis: Diagnosis) -> None:
    assert read_evidence(json_report(evidence, diagnosis)) == evidence


def test_evidence_alone_is_read_too(evidence: Evidence) -> None:
    assert read_evidence(to_json(evidence)) == evidence


def test_the_whole_report_round_trips(evidence: Evidence, diagnosis: Diagnosis) -> None:
    report = msgspec.json.decode(json_report(evidence, diagnosis), type=JsonReport)

    assert report == JsonReport(evidence=evidence, findings=diagnosis.findings, diagnosis=diagnosis)


def test_findings_are_plain_objects_with_every_field(evidence: Evidence, diagnosis: Diagnosis) -> None:
    report = json.loads(json_report(evidence, diagnosis))

    first = report["findings"][0]
    assert list(report) == ["evidence", "findings", "diagnosis", "load"]
    assert set(first) == set(RankedFinding.__struct_fields__)
    assert (first["rule"], first["line"], first["gain"]) == ("bandwidth.written-out-attention", 48, [1.28, 1.44])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"\x80\x04\x95pickle", "byte 0 is not UTF-8"),
        (b"step_s = 1", "not JSON"),
        (b'{"evidence": "\xff"}', "byte 14 is not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "a JSON array is no report"),
        (b'{"a": ' * 100_000, "not JSON|breaks off"),
        (b'{"schema_version": 1, "workload": ' + b'{"a": ' * 100_000, "not JSON|breaks off|not a Evidence"),
        (b"[1, 2]", "a JSON array is no report"),
        (b'"text"', "a JSON string is no report"),
        (b"null", "a JSON null is no report"),
        (b"{}", "an empty JSON object is neither"),
        (b'{"traceEvents": [], "schemaVersion": 1}', "a JSON object with 'traceEvents', 'schemaVersion' is neither"),
        (b'{"evidence": 3}', "a JSON number is no report"),
        (b'{"evidence": null}', "a JSON null is no report"),
        (b'{"evidence": {}}', "an empty JSON object is neither"),
        (b'{"schema_version": "1"}', 'schema_version "1" is not a whole number'),
        (b'{"schema_version": null}', "schema_version null is not a whole number"),
        (b'{"schema_version": 0}', "schema_version 0 does not exist"),
        (b'{"schema_version": 1}', "not a Evidence record: .*workload"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_evidence(data)


def test_a_newer_schema_asks_for_an_upgrade(evidence: Evidence, diagnosis: Diagnosis) -> None:
    newer = msgspec.structs.replace(evidence, schema_version=SCHEMA_VERSION + 1)

    with pytest.raises(
        RecordError, match=rf"schema_version {SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}, .*; upgrade flatout"
    ):
        read_evidence(json_report(newer, diagnosis))


def test_a_newer_schema_is_recognised_although_its_fields_are_unknown() -> None:
    with pytest.raises(RecordError, match="upgrade flatout"):
        read_evidence(b'{"evidence": {"schema_version": 99, "workload": 5}}')


def test_a_file_that_was_cut_short_says_so(evidence: Evidence, diagnosis: Diagnosis) -> None:
    data = json_report(evidence, diagnosis)

    with pytest.raises(RecordError, match=f"breaks off after {len(data) // 2} bytes, the file was cut short"):
        read_evidence(data[: len(data) // 2])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999), noise=st.binary(max_size=8))
def test_no_damage_raises_anything_but_a_record_error(
    evidence: Evidence, diagnosis: Diagnosis, share: float, noise: bytes
) -> None:
    data = json_report(evidence, diagnosis)
    at = int(len(data) * share)

    for damaged in (data[:at], data[:at] + noise + data[at + len(noise) :]):
        try:
            read_evidence(damaged)
        except RecordError as e:
            assert ";" in str(e)
