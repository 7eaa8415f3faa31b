"""The report for programs: one JSON object with the evidence, the findings and the whole diagnosis; and back."""

from __future__ import annotations

from inspect import cleandoc
from typing import Final

import msgspec

from flatout.core.errors import RecordError
from flatout.core.records.evidence import SCHEMA_VERSION, Evidence
from flatout.core.records.finding import Diagnosis, RankedFinding
from flatout.core.records.places import check_places
from flatout.core.records.record import Record, from_json, to_json
from flatout.report.parts.load import load_message

_TYPES: Final = {b"[": "array", b'"': "string", b"t": "boolean", b"f": "boolean", b"n": "null"}


class JsonReport(Record, frozen=True, kw_only=True):
    """What the file holds. `findings` are those of the diagnosis, ranked, where a reader looks first.

    `load` says in words what else the machine was busy with while the steps were timed, '' where it was quiet.
    """

    evidence: Evidence
    findings: tuple[RankedFinding, ...]
    diagnosis: Diagnosis
    load: str = ""


class _Outline(msgspec.Struct):
    """As much of a file as tells what it is."""

    evidence: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    schema_version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def json_report(evidence: Evidence, diagnosis: Diagnosis) -> bytes:
    """The report as indented JSON (UTF-8); `read_evidence` gives the evidence back."""
    return to_json(
        JsonReport(evidence=evidence, findings=diagnosis.findings, diagnosis=diagnosis, load=load_message(evidence))
    )


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
        raise _refusal(f"byte {e.start} is not UTF-8, a report is JSON in UTF-8") from e
    outline = _outline(data)
    if isinstance(outline.evidence, msgspec.Raw):
        data = bytes(outline.evidence)
        outline = _outline(data)
    if not isinstance(outline.schema_version, msgspec.Raw):
        raise _refusal(f"{_shape(data)} is neither a flatout report nor Evidence: it has no 'schema_version'")
    _check_version(outline.schema_version)
    evidence = from_json(data, Evidence)
    check_places(evidence)
    return evidence


def _refusal(because: str, *, remedy: str = "give a JSON file that flatout wrote") -> RecordError:
    return RecordError(f"{because}; {remedy}")


def _outline(data: bytes) -> _Outline:
    if not data.strip():
        raise _refusal("the file is empty, a report is one JSON object", remedy="write it again")
    try:
        return msgspec.json.decode(data, type=_Outline)
    except msgspec.ValidationError as e:
        raise _refusal(f"{_shape(data)} is no report, which is one JSON object") from e
    except (msgspec.DecodeError, RecursionError) as e:
        if "truncated" not in str(e):
            raise _refusal(f"the file is not JSON: {e}") from e
        because = f"the JSON breaks off after {len(data)} bytes, the file was cut short"
        raise _refusal(because, remedy="write it again") from e


def _check_version(raw: msgspec.Raw) -> None:
    try:
        version = msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError as e:
        shown = bytes(raw)[:40].decode(errors="replace")
        raise _refusal(f"schema_version {shown} is not a whole number") from e
    if version > SCHEMA_VERSION:
        because = f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest known here"
        raise _refusal(because, remedy="upgrade flatout")
    if version < 1:
        raise _refusal(f"schema_version {version} does not exist, the first is 1")


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
