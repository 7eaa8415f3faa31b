"""One comparison of a search, made by a worker: `python -m flatout.app.cli.children.compare FOLDER NUMBER`.

FOLDER has `NUMBER.json`; the Verdict goes to `NUMBER.verdict`, why there is none to `NUMBER.failed`. Not a command of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Make the comparison; 0 where there is a Verdict."""
    from flatout.core.errors import FlatoutError
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import from_json, to_json
    from flatout.core.registry import levers
    from flatout.tune.search.comparisons import LeverComparison, compare_here

    folder, number = Path(sys.argv[1]), sys.argv[2]
    try:
        comparison = from_json((folder / f"{number}.json").read_bytes(), LeverComparison)
        verdict = compare_here(comparison, {lever.id: lever for lever in levers()})
    except FlatoutError as e:
        write_whole_file(folder / f"{number}.failed", f"{type(e).__name__}: {e}\n".encode())
        return 1
    write_whole_file(folder / f"{number}.verdict", to_json(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
