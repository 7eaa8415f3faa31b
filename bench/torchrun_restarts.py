"""Seconds from a kill of a rank to the next step: under torchrun, and under flatout-torchrun, in turns.

    python bench/torchrun_restarts.py [--kills 5] [--rounds 2] [--ranks 2] [--device cpu] [--only NAME] [--out FILE]

Each job trains the same small model, and one rank after the other is killed at the beginning of a step. Copies of the state lie
in memory under both. Losses are compared bit by bit with those of a job that was not disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.core.files import write_whole_file

TRAIN = Path(__file__).parents[1] / "tests" / "blocks" / "elastic" / "train.py"
LAUNCHERS = {"torchrun": "torch.distributed.run", "flatout-torchrun": "flatout.blocks.elastic.torchrun"}


def job(
    module: str, folder: Path, kills: int, asked: argparse.Namespace
) -> tuple[list[float], list[set[tuple[str, str]]]]:
    """Seconds of each recovery, and each rank's (step, loss)."""
    (folder / "memory").mkdir(parents=True)
    plan = [{"phase": "forward", "rank": n % asked.ranks, "step": 4 + 4 * n} for n in range(kills)]
    options = {"disk_every": 10_000, "memory": str(folder / "memory"), "device": asked.device}
    steps = 4 + 4 * asked.kills + 2
    command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={asked.ranks}"]
    command += [f"--max-restarts={kills}", "--monitor-interval=0.1", str(TRAIN), str(folder), f"{steps}"]
    command += [json.dumps(plan), json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr[-3000:])
    logs = [[line.split() for line in (folder / f"log-{rank}").read_text().splitlines()] for rank in range(asked.ranks)]
    seconds = []
    for number in range(kills):
        killed_s = float((folder / f"killed-{number}").read_text())
        firsts = [min(float(at_s) for start, _, at_s, _ in log if int(start) == number + 1) for log in logs]
        seconds.append(max(firsts) - killed_s)
    return seconds, [{(step, loss) for _, step, _, loss in log} for log in logs]


def main() -> None:
    """Run jobs in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=tuple(LAUNCHERS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    names = [asked.only] if asked.only else list(LAUNCHERS)
    found: dict[str, list[float]] = {name: [] for name in names}
    same = dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory() as temporary:
        _, whole = job(LAUNCHERS["flatout-torchrun"], Path(temporary) / "whole", 0, asked)
        for number in range(asked.rounds):
            for name in names:
                seconds, losses = job(LAUNCHERS[name], Path(temporary) / f"{name}-{number}", asked.kills, asked)
                found[name] += seconds
                same[name] += asked.kills * (losses == whole)
                print(
                    name,
                    [round(s, 2) for s in seconds],
                    "same losses" if losses == whole else "OTHER LOSSES",
                    flush=True,
                )
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name()
        if asked.device == "cuda"
        else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "ranks": asked.ranks,
    }
    for name, seconds in found.items():
        result[name] = {
            "kills": len(seconds),
            "recovered_bit_for_bit": same[name],
            "seconds_median": median(seconds),
            "seconds_range": [min(seconds), max(seconds)],
        }
        print(name, result[name])
    if asked.out:
        write_whole_file(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
