"""The same script on a quiet machine and with a core kept busy: do the findings agree, and does the second report say so?

    python bench/two_loads.py [SCRIPT ...] [--seconds 10] [--busy-cores 1] [--out bench/results/...]

Each script is checked twice, the second time beside a process for each core to keep busy. Findings are compared by rule and line:
those of the quiet report that save at least 10 % of the step should be in the other, whatever the times are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = (
    "slow/event_classifier.py",
    "slow/digit_transfer.py",
    "slow/light_curves.py",
    "controls/wave_transformer.py",
)
MUCH = 1.1
"""Gain from which a finding of the quiet run is expected under load, too: smaller ones are within its noise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, nargs="*", default=[ROOT / "examples" / name for name in EXAMPLES])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--busy-cores", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows = [compared(script, options) for script in options.scripts]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def compared(script: Path, options: argparse.Namespace) -> dict[str, Any]:
    quiet, said_when_quiet = check(script, options.seconds)
    with busy(options.busy_cores):
        loaded, said = check(script, options.seconds)
    much, found = places(quiet, least_gain=MUCH), places(loaded)
    row = {
        "script": script.name,
        "quiet": sorted(places(quiet)),
        "busy": sorted(found),
        "missing_when_busy": sorted(much - found),
        "agree": much <= found,
        "said_when_quiet": said_when_quiet,
        "said_when_busy": said,
        "step_s": [r["evidence"]["steps"]["step_s"] for r in (quiet, loaded)],
    }
    missing = f"NO, missing {row['missing_when_busy']}"
    print(
        f"{row['script']:24} quiet {row['step_s'][0] * 1e3:7.2f} ms, busy {row['step_s'][1] * 1e3:7.2f} ms; findings agree: "
        f"{'yes' if row['agree'] else missing}; says: {said or 'NOTHING'}",
        flush=True,
    )
    return row


def places(report: dict[str, Any], *, least_gain: float = 1.0) -> set[tuple[str, int]]:
    """Rule and line of each finding whose gain is at least this in the middle."""
    return {
        (f["rule"], f["line"])
        for f in report["findings"]
        if (f["gain"][0] * f["gain"][1]) ** 0.5 >= least_gain and not f["advice"]
    }


@contextlib.contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """So many processes that compute for nothing."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check(script: Path, seconds: float) -> tuple[dict[str, Any], str]:
    """The report, and what it says of the machine above the length of the step; '' where it says nothing there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        start = [sys.executable, "-c", "from flatout.app.cli import main; main()", "check", "--json", str(out)]
        done = subprocess.run(
            [*start, "--seconds", str(seconds), str(script)], capture_output=True, text=True, check=False
        )
        if not out.exists():
            raise SystemExit(f"flatout check {script} wrote no report: {done.stderr[-500:]}")
        text = " ".join((done.stdout + done.stderr).split())
        above = text[: text.index(" steps timed")] if " steps timed" in text else text
        said = re.search(r"Other processes used .*? than on a quiet machine\.", above)
        return json.loads(out.read_text()), said.group() if said else ""


if __name__ == "__main__":
    sys.exit(main())
