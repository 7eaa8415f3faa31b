"""Ten thousand changed files of each kind that flatout reads: what came of them, as the table of SECURITY.md has it.

    python bench/fuzz_files.py [--num 10000] [--seed 0] [KIND ...]

Each kind runs in a process of its own, whose memory is limited (tests/foreign_files.py). Exits with 1 where a reading did
anything else than succeed or raise a FlatoutError.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tests" / "foreign_files.py"
KINDS = (
    "plan", "sizes", "search-log", "machine", "messages", "pruning", "recorded-steps", "run", "memory-copy", "teacher-cache",
    "shrunk", "trace", "quantised", "adapter", "report", "engine", "checkpoint", "drawn-report",
)  # fmt: skip


def main() -> int:
    """Print one row a kind, and every failure below its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    is_sound = True
    print("| kind | files | read | refused | anything else | grew by at most |\n|---|---|---|---|---|---|", flush=True)
    for kind in arguments.kinds:
        command = [sys.executable, str(TOOL), kind, str(arguments.num), str(arguments.seed)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"| {kind} | ended with {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]} |", flush=True)
            is_sound = False
            continue
        found = json.loads(ended.stdout.splitlines()[-1])
        num_failed = sum(found["failures"].values())
        grew = f"{found['most_more_bytes'] / 2**20:.0f} MiB"
        counts = f"{arguments.num} | {found['num_read']} | {found['num_refused']} | {num_failed}"
        print(f"| {kind} | {counts} | {grew} |", flush=True)
        for example in found["examples"]:
            print(f"  {example}", flush=True)
        is_sound = is_sound and not num_failed
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
