"""`flatout schema`: what a program may expect in the file that --json writes."""

from __future__ import annotations

import sys


def schema() -> None:
    """Print the JSON Schema of what --json writes."""
    from flatout.reporting.json_report import json_schema

    sys.stdout.write(json_schema())
