"""The JSON Schema of the report for programs."""

from __future__ import annotations

import json
from pathlib import Path

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis
from flatout.report.json_report import json_report, json_schema

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_in_the_documentation_is_up_to_date() -> None:
    told = (DOCS / "schema.json").read_text(encoding="utf-8")

    assert told == json_schema(), "python docs/generate_schema.py, and commit docs/schema.json"


def test_every_field_of_a_report_is_in_the_schema(evidence: Evidence, diagnosis: Diagnosis) -> None:
    schema = json.loads(json_schema())
    report = json.loads(json_report(evidence, diagnosis))

    definitions = schema["$defs"]
    assert schema["$ref"] == "#/$defs/JsonReport"
    for kind, value in (("JsonReport", report), ("Evidence", report["evidence"]), ("Diagnosis", report["diagnosis"])):
        assert set(definitions[kind]["properties"]) == set(value)
