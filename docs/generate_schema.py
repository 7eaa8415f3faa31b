"""Write docs/schema.json: the JSON Schema of what `flatout check --json` writes.

python docs/generate_schema.py            writes it
python docs/generate_schema.py --check    writes nothing; exits with 1 when it is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flatout.report.json_report import json_schema

PATH = Path(__file__).parent / "schema.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/schema.json from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the file is out of date")
    is_check = parser.parse_args().check

    wanted = json_schema()
    if PATH.exists() and PATH.read_text(encoding="utf-8") == wanted:
        return 0
    if is_check:
        sys.stdout.write("docs/schema.json is out of date; run 'make docs' and commit it\n")
        return 1
    PATH.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
