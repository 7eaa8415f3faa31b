"""Predicted against measured gain of the distributed example pair.

    python bench/check_ranks.py [--nproc 2] [--rounds 3] [--steps 120] [--out bench/results/.../ranks.json]

`flatout check --nproc N` on examples/distributed/slow/*.py predicts; the gain is measured without flatout, by interleaved runs
of both twins under torchrun, whose rank 0 times its own steps with bench/step_time.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "distributed"
EXPECTED = {"digits_ddp.py": "communication.sync-while-accumulating"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows = [
        judge(name, rule, nproc=options.nproc, rounds=options.rounds, steps=options.steps)
        for name, rule in EXPECTED.items()
    ]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def judge(name: str, rule: str, *, nproc: int, rounds: int, steps: int) -> dict[str, Any]:
    reports = {twin: check(FOLDER / twin / name, nproc=nproc, steps=steps) for twin in ("slow", "fast")}
    pairs = [
        tuple(step_s(FOLDER / twin / name, nproc=nproc, steps=steps) for twin in ("slow", "fast"))
        for _ in range(rounds)
    ]
    measured = statistics.median(slow / fast for slow, fast in pairs)
    findings = reports["slow"]["findings"]
    first = findings[0] if findings else None
    predicted = math.sqrt(first["gain"][0] * first["gain"][1]) if first else 1.0
    row = {
        "name": name,
        "nproc": nproc,
        "rule": rule,
        "named": first["rule"] if first else None,
        "line": first["line"] if first else None,
        "gain": first["gain"] if first else None,
        "predicted": predicted,
        "measured": measured,
        "measured_s": pairs,
        "findings_of_twin": [(f["rule"], f["line"], f["gain"]) for f in reports["fast"]["findings"]],
        "ranks": reports["slow"]["evidence"]["distributed"]["ranks"],
    }
    print(
        f"{name:20} named {row['named']} line {row['line']} predicted {predicted:.2f} {row['gain']} "
        f"measured {measured:.2f}; the twin's findings: {row['findings_of_twin']}"
    )
    return row


def check(script: Path, *, nproc: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "flatout.app.cli", "check", "--nproc", str(nproc), "--json", str(out)]
        subprocess.run([*command, str(script), "--", "--steps", str(steps)], stdout=subprocess.DEVNULL, check=True)
        return dict(json.loads(out.read_text()))


def step_s(script: Path, *, nproc: int, steps: int) -> float:
    """Mean step of rank 0, timed by step_time.py in each rank; every rank prints a line, they agree to the collective's skew."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run(
        [*launcher, str(ROOT / "bench" / "step_time.py"), str(script), "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    decoder = json.JSONDecoder()
    means = []
    at = done.stdout.find('{"mean_s"')
    while at >= 0:
        record, _ = decoder.raw_decode(done.stdout[at:])
        means.append(record["mean_s"])
        at = done.stdout.find('{"mean_s"', at + 1)
    return statistics.fmean(means)


if __name__ == "__main__":
    sys.exit(main())
