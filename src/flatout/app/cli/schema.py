"""`flatout schema`: what a program may expect in the file that --json writes."""

from __future__ import annotations

import sys

from flatout.app.cli.command import Command


def schema() -> None:
    """Print the JSON Schema of what --json writes."""
    from flatout.report.json_report import json_schema

    sys.stdout.write(json_schema())


COMMAND = Command(
    schema,
    order=130,
    group="records",
    examples=("flatout schema", "flatout schema > schema.json"),
)
