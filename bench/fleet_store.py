"""How long `flatout fleet` takes to open a fleet, and a job's record to be written.

    python bench/fleet_store.py [--jobs 10000] [--repeats 5] [--out FILE]

Built records of two weeks, in the forms that a store has: an SQLite file, a folder with a file for each row, and the same after
`flatout fleet tidy`. Each is opened by the whole command, `flatout fleet --days 7`, in a process of its own: seconds from start
to end, interpreter and imports included. Rows are written one by one, as heartbeats are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import msgspec

from flatout.blocks.recording.job_store.opening import open_store
from flatout.core.records.job import JobRecord
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.stats import median_estimate

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.fleet_jobs import NOW_S, finding, fleet, job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = shifted([*fleet(options.jobs - 1), worst()])
    result: dict[str, object] = {"processor": cpu_model(), "cores": os.cpu_count(), "jobs": len(records)}
    with tempfile.TemporaryDirectory() as top:
        for name, path in (("sqlite", "fleet.sqlite"), ("files", "fleet")):
            store = open_store(Path(top) / path)
            began = perf_counter()
            for record in records:
                store.write(record)
            result[f"{name}_write_s"] = (perf_counter() - began) / len(records)
            result[f"{name}_open_s"] = opened(Path(top) / path, options.repeats)
        store.tidy(now_s=datetime.now(UTC).timestamp() + 1.0)
        result["parquet_open_s"] = opened(Path(top) / "fleet", options.repeats)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")
    return 0


def worst() -> JobRecord:
    """The planted job that has to come first."""
    return job(10**6, name="worst.py", seconds=72_000.0, findings=(finding((3.0, 4.0)),), saved_fraction=0.75)


def shifted(records: list[JobRecord]) -> list[JobRecord]:
    """The records as if they had just been written."""
    more_s = datetime.now(UTC).timestamp() - NOW_S
    return [
        msgspec.structs.replace(r, began_s=r.began_s + more_s, written_s=r.written_s + more_s, last_step_s=None)
        for r in records
    ]


def opened(path: Path, repeats: int) -> list[float]:
    """Median, low and high of the seconds that the command takes; the planted job has to come first."""
    seconds = []
    for _ in range(repeats + 1):
        began = perf_counter()
        command = [sys.executable, "-m", "flatout.app.cli", "fleet", "--store", path, "--days", "7", "--top", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "140"})
        seconds.append(perf_counter() - began)
        first = next(line for line in done.stdout.splitlines() if line.startswith("1 "))
        assert "worst.py" in first, first
    found = median_estimate(seconds[1:])  # the first reads from the disk
    return [found.value, found.low, found.high]


if __name__ == "__main__":
    sys.exit(main())
