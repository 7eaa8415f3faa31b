"""Generated training scripts through `flatout tune`, `run` and `edit`: does any plan or text change what is learnt?

    python bench/world/generated.py --out FILE [--first 0] [--number 300] [--budget 40s] [--only SEED ...] [--jobs 1]
                                       [--device cuda]

For each seed: the script of `generated_scripts.py`, a search for a plan, and with a plan the script's last losses on three
seeds, untouched, with `flatout run --plan`, and as the text that `flatout edit` makes. Where these seem to differ the untouched
script runs on more seeds, and with kernels that round otherwise. Steps and memory are not measured.

Rows are written as they come; a run that was stopped goes on with the seeds that are missing. Several jobs share the cores
evenly, each on its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Lock
from time import monotonic
from typing import Any

from generated_scripts import script_of
from scripts import completed, machine_of, shares_of

ROOT = Path(__file__).resolve().parents[2]
FLATOUT = [sys.executable, "-m", "flatout"]
MOVES = (0, 1000, 2000)
MORE_MOVES = tuple(range(3000, 13_000, 1000))
"""Seeds of the untouched script where a form seems to differ: three show little of how far its own losses reach."""
LONGEST_S = 600.0
OTHER_ROUNDING = {"cpu": {"ATEN_CPU_CAPABILITY": "default"}, "cuda": {"NVIDIA_TF32_OVERRIDE": "1"}}
"""Kernels without the vector units, or products in TF32: they round otherwise, which moves chaotic steps (GANs) as far as other
seeds do."""
Run = Callable[..., subprocess.CompletedProcess[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--only", type=int, nargs="*", default=None)
    parser.add_argument("--budget", default="40s")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=list(OTHER_ROUNDING), default="cpu")
    options = parser.parse_args()
    rows = {row["seed"]: row for row in json.loads(options.out.read_text())["scripts"]} if options.out.exists() else {}
    shares: Queue[list[int]] = Queue()
    for share in shares_of(options.jobs):
        shares.put(share)
    done = Lock()

    def judge(seed: int) -> None:
        share = shares.get()
        with tempfile.TemporaryDirectory() as name:
            row = judged(seed, Path(name), options.budget, share, options.device)
        shares.put(share)
        with done:
            rows[seed] = row
            print(line_of(row), flush=True)
            found = {
                "date": datetime.now(UTC).date().isoformat(),
                "machine": machine_of(sys.executable, share),
                "device": options.device,
                "budget": options.budget,
                "summary": summarise([*rows.values()]),
                "scripts": [*rows.values()],
            }
            options.out.write_text(json.dumps(found, indent=1))

    wanted = options.only or [s for s in range(options.first, options.first + options.number) if s not in rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, wanted))
    print(json.dumps(summarise([*rows.values()]), indent=1))
    return 0


def judged(seed: int, folder: Path, budget: str, cores: list[int], device: str) -> dict[str, Any]:
    """One script on these cores: its plan, and the last losses of all its forms."""
    run = partial(run_on, cores)
    generated = script_of(seed, device)
    (folder / "train.py").write_text(generated.text)
    began = monotonic()
    done = run(
        [*FLATOUT, "tune", "--time-budget", budget, "--out", "plan.toml", "--json", "tuned.json", "train.py"], folder
    )
    row: dict[str, Any] = {
        "seed": seed,
        "features": generated.features,
        "tune_s": monotonic() - began,
        "tune_exit": done.returncode,
    }
    if not (folder / "tuned.json").exists():
        return row | {"error": (done.stdout + done.stderr)[-800:]}
    tuned = json.loads((folder / "tuned.json").read_text())
    row["levers"] = [p["id"] for p in tuned["plan"]["lever"]]
    row["claimed"] = (tuned["plan"].get("measured") or [None])[0]
    row["guarantee"] = tuned["plan"]["guarantee"]
    row["left_out"] = [[one["lever"], one["because"]] for one in tuned["left_out"] if one["is_for_script"]]
    if not row["levers"]:
        return row
    forms = {"untouched": [sys.executable, "train.py"], "plan": [*FLATOUT, "run", "--plan", "plan.toml", "train.py"]}
    edited = run([*FLATOUT, "edit", "--plan", "plan.toml", "--out", "text", "train.py"], folder)
    row["edit"] = {"exit": edited.returncode, "messages": edited.stderr[-500:]}
    if (folder / "text" / "train.py").exists():
        forms["edit"] = [sys.executable, str(folder / "text" / "train.py")]
    row["losses"] = {name: [last_loss(run, command, folder, move) for move in MOVES] for name, command in forms.items()}
    if any(differs(row, form) for form in ("plan", "edit")):
        control = [last_loss(run, forms["untouched"], folder, move, OTHER_ROUNDING[device]) for move in MOVES]
        row["losses"]["untouched, other rounding"] = control
        row["losses"]["untouched, more seeds"] = [last_loss(run, forms["untouched"], folder, m) for m in MORE_MOVES]
    return row


def last_loss(
    run: Run, command: list[str], folder: Path, move: int, more: dict[str, str] | None = None
) -> float | None:
    """The mean of the last losses that the script prints; None where it failed."""
    done = run(command, folder, {"MOVE_SEED": str(move)} | (more or {}))
    line = next((line for line in done.stdout.splitlines() if line.startswith("losses ")), None)
    if done.returncode or line is None:
        return None
    return statistics.fmean(map(float, line.split()[1:]))


def run_on(
    cores: list[int], command: list[str], folder: Path, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | (more or {})
    return completed(command, folder, environment, timeout_s=LONGEST_S, cores=cores)


def differs(row: dict[str, Any], form: str) -> bool:
    """Whether a form failed, or learns something else: its losses must lie inside the spread of the untouched script's seeds.

    The spread is taken half wider on both sides; over more seeds and kernels that round otherwise, where it ran on those, too.
    """
    losses = row.get("losses", {})
    if form not in losses:
        return False
    if None in losses[form]:
        return None not in losses["untouched"]
    more = (*losses.get("untouched, other rounding", ()), *losses.get("untouched, more seeds", ()))
    known = [*losses["untouched"], *(value for value in more if value is not None)]
    low, high = min(known), max(known)
    room = 0.5 * (high - low) + 0.01 * abs(high)
    return not all(low - room <= value <= high + room for value in losses[form])


def line_of(row: dict[str, Any]) -> str:
    what = row.get("error", "")[-120:] or ", ".join(row["levers"]) or "no plan"
    wrong = [form for form in ("plan", "edit") if differs(row, form)]
    judgement = f"  DIFFERS: {wrong} {row['losses']}" if wrong else ""
    return f"{row['seed']:4} {row['tune_s']:4.0f} s  {' + '.join(row['features'])}: {what} {row.get('claimed') or ''}{judgement}"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    planned = [r for r in rows if r.get("levers")]
    edits = [r["edit"]["exit"] for r in planned if "edit" in r]
    return {
        "scripts": len(rows),
        "failed": [r["seed"] for r in rows if "error" in r],
        "plans": len(planned),
        "plans that change what is learnt": [r["seed"] for r in planned if differs(r, "plan")],
        "texts": sum("edit" in r.get("losses", {}) for r in planned),
        "texts that change what is learnt": [r["seed"] for r in planned if differs(r, "edit")],
        "edit's exit codes": {str(code): edits.count(code) for code in sorted(set(edits))},
    }


if __name__ == "__main__":
    sys.exit(main())
