"""`flatout machine` and `flatout check` on a machine with an accelerator, beside independent timings of the same scripts.

    python bench/device_check.py OUT_FOLDER

Writes each report as text, and `summary.json` with the machine record and, for two sizes of examples/gpu/gpt_train.py, what
flatout says about the host reads and the gain it predicts, against the gain that bench/step_time.py measures on its twin.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLATOUT = [sys.executable, "-c", "from flatout.app.cli import main; main()"]
SIZES = {
    "gpt2-small": ["--steps", "80"],
    "host-bound": [
        "--steps",
        "150",
        "--layers",
        "6",
        "--width",
        "256",
        "--heads",
        "4",
        "--context",
        "128",
        "--batch",
        "4",
    ],
}


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (out / "machine.txt").write_text(run([*FLATOUT, "machine", "--refresh", "--json", f"{folder}/machine.json"]))
        machine = json.loads(Path(folder, "machine.json").read_text())
        sizes = {name: judge(name, size, out, Path(folder)) for name, size in SIZES.items()}
    summary = {"machine": machine, "sizes": sizes}
    (out / "summary.json").write_text(json.dumps(summary, indent=1).replace(f"{ROOT}/", "") + "\n")
    print(json.dumps(sizes, indent=1))
    return 0


def judge(name: str, size: list[str], out: Path, folder: Path) -> dict[str, Any]:
    reports = {}
    for twin in ("gpt_train", "gpt_train_fast"):
        script = str(ROOT / "examples" / "gpu" / f"{twin}.py")
        path = folder / f"{name}-{twin}.json"
        text = run([*FLATOUT, "check", "--json", str(path), "--seconds", "10", script, "--", *size])
        (out / f"{name}-{twin}.txt").write_text(text)
        print(text)
        reports[twin] = json.loads(path.read_text())
    pairs = [(step_s("gpt_train", size), step_s("gpt_train_fast", size)) for _ in range(3)]
    evidence = reports["gpt_train"]["evidence"]
    return {
        "steps": evidence["steps"] | {"durations_s": None},
        "findings": [
            {k: f[k] for k in ("rule", "line", "text", "cost_s", "gain", "because")}
            for f in reports["gpt_train"]["findings"]
        ],
        "notes": reports["gpt_train"]["diagnosis"]["notes"],
        "findings_of_twin": [(f["rule"], f["line"], f["gain"]) for f in reports["gpt_train_fast"]["findings"]],
        "measured_s": pairs,
        "measured_gain": statistics.median(slow / fast for slow, fast in pairs),
        "observing": evidence["observing"],
    }


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}, check=False)
    if done.returncode:
        print(done.stderr[-3000:])
    return done.stdout


def step_s(twin: str, size: list[str]) -> float:
    script = str(ROOT / "examples" / "gpu" / f"{twin}.py")
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "step_time.py"), script, *size],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["mean_s"])


if __name__ == "__main__":
    sys.exit(main())
