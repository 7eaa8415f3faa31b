"""The report for programs: one JSON object with the evidence, the findings and the whole diagnosis; and back."""

from __future__ import annotations

from inspect import cleandoc
from typing import Final

import msgspec

from flatout.errors import RecordError
from flatout.records.evidence import SCHEMA_VERSION, Evidence
from flatout.records.finding import Diagnosis, RankedFinding
from flatout.records.record import Record, from_json, to_json

_TYPES: Final = {b"[": "array", b'"': "string", b"t": "boolean", b"f": "boolean", b"n": "null"}


class JsonReport(Record, frozen=True, kw_only=True):
    """What the file holds. `findings` are those of the diagnosis, ranked, where a reader looks first."""

    evidence: Evidence
    findings: tuple[RankedFinding, ...]
    diagnosis: Diagnosis


class _Outline(msgspec.Struct):
    """As much of a file as tells what it is."""

    evidence: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    schema_version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def json_report(evidence: Evidence, diagnosis: Diagnosis) -> bytes:
    """The report as indented JSON (UTF-8); `read_evidence` gives the evidence back."""
    return to_json(JsonReport(evidence=evidence, findings=diagnosis.findings, diagnosis=diagnosis))


def json_schema() -> str:
    """The JSON Schema (2020-12) of what `json_report` writes, indented, with a line end."""
    described = msgspec.json.schema(JsonReport)
    for definition in described["$defs"].values():
        if "description" in definition:  # Python 3.13 strips the indentation of docstrings, older ones keep it
            definition["description"] = cleandoc(definition["description"])
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1).decode() + "\n"


def read_evidence(data: bytes) -> Evidence:
    """The evidence in a report of `json_report`, or in the JSON of an Evidence alone.

    Raises RecordError when `data` is damaged, holds something else, or was written by a newer flatout.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise RecordError(
            f"byte {e.start} is not UTF-8, a report is JSON in UTF-8; give a JSON file that flatout wrote"
        ) from e
    outline = _outline(data)
    if isinstance(outline.evidence, msgspec.Raw):
        data = bytes(outline.evidence)
        outline = _outline(data)
    if not isinstance(outline.schema_version, msgspec.Raw):
        raise RecordError(
            f"{_shape(data)} is neither a flatout report nor Evidence: it has no 'schema_version'; "
            "give a JSON file that flatout wrote"
        )
    _check_version(outline.schema_version)
    return from_json(data, Evidence)


def _outline(data: bytes) -> _Outline:
    if not data.strip():
        raise RecordError("the file is empty, a report is one JSON object; write it again")
    try:
        return msgspec.json.decode(data, type=_Outline)
    except msgspec.ValidationError as e:
        raise RecordError(
            f"{_shape(data)} is no report, which is one JSON object; give a file that flatout wrote"
        ) from e
    except (msgspec.DecodeError, RecursionError) as e:
        if "truncated" in str(e):
            raise RecordError(
                f"the JSON breaks off after {len(data)} bytes, the file was cut short; write it again"
            ) from e
        raise RecordError(f"the file is not JSON: {e}; give a JSON file that flatout wrote") from e


def _check_version(raw: msgspec.Raw) -> None:
    shown = bytes(raw)[:40].decode(errors="replace")
    try:
        version = msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError as e:
        raise RecordError(f"schema_version {shown} is not a whole number; give a JSON file that flatout wrote") from e
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest known here; upgrade flatout"
        )
    if version < 1:
        raise RecordError(
            f"schema_version {version} does not exist, the first is 1; give a JSON file that flatout wrote"
        )


def _shape(data: bytes) -> str:
    """What the JSON is, in a few words: its first keys, or its type."""
    start = data.lstrip()[:1]
    if start != b"{":
        return f"a JSON {_TYPES.get(start, 'number')}"
    try:
        names = list(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        return "a JSON object"
    keys = ", ".join(ascii(name[:40]) for name in names[:5])
    return f"a JSON object with {keys}" if keys else "an empty JSON object"
