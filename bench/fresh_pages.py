"""What memory taken anew in every step costs a script, and whether the kernel's own accounting says so.

    python bench/fresh_pages.py [SCRIPT ...] [--rounds 5] [--seconds 4] [--out FILE]

Each script runs as it is and with glibc told to keep freed memory (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_), in turn, each
run in a process of its own. Told: the step both ways, page faults and seconds in the kernel of the thread that runs the steps
(what the rule capacity.fresh-pages reads), and how much of the difference those seconds are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.machine.measure.stats import ratio_estimate

ROOT = Path(__file__).resolve().parents[1]
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
SCRIPTS = [
    "slow/hashed_ngrams",
    "slow/sea_surface",
    "slow/char_gpt",
    "slow/contrastive_losses",
    "controls/cnn_digits",
    "controls/shifted_digits",
    "controls/gru_signals",
    "controls/digit_autoencoder",
    "controls/tabular_mlp",
]
WARM_UP = 20


class Enough(BaseException):
    """Raised to end a script that has run long enough."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", default=[str(ROOT / "examples" / f"{name}.py") for name in SCRIPTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.scripts[0], options.seconds)))
        return 0
    rows = [compare(script, options.rounds, options.seconds) for script in options.scripts]
    if options.out:
        about = {
            "torch": torch.__version__,
            "libc": " ".join(platform.libc_ver()),
            "kernel": platform.release(),
            "threads": torch.get_num_threads(),
        }
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


def run(script: str, seconds: float) -> dict[str, float]:
    """Step, faults and kernel time of the main thread, a step, from the 20th on."""
    marks: list[tuple[float, int, float]] = []

    def mark(*_: object) -> None:
        counts = resource.getrusage(resource.RUSAGE_THREAD)
        marks.append((perf_counter(), counts.ru_minflt, counts.ru_stime))
        if marks[-1][0] - marks[0][0] > seconds:
            raise Enough

    handle = register_optimizer_step_post_hook(mark)
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    with contextlib.suppress(Enough):
        runpy.run_path(script, run_name="__main__")
    handle.remove()
    first = min(WARM_UP, len(marks) // 3)
    num = len(marks) - 1 - first
    step_s, faults, kernel_s = ((b - a) / num for a, b in zip(marks[first], marks[-1], strict=True))
    return {"step_s": step_s, "faults": faults, "kernel_s": kernel_s}


def in_a_process(script: str, seconds: float, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, script, "--run", "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(script: str, rounds: int, seconds: float) -> dict[str, Any]:
    pairs = [(in_a_process(script, seconds, {}), in_a_process(script, seconds, KEPT)) for _ in range(rounds)]
    now, kept = ([p[i]["step_s"] for p in pairs] for i in (0, 1))
    ratio = ratio_estimate(now, kept)
    kernel_s = statistics.median(p[0]["kernel_s"] for p in pairs)
    saved_s = statistics.median(a - b for a, b in zip(now, kept, strict=True))
    row = {
        "script": str(Path(script).relative_to(ROOT)) if Path(script).is_relative_to(ROOT) else Path(script).name,
        "step_s": statistics.median(now),
        "kept_step_s": statistics.median(kept),
        "gain": ratio.value,
        "interval": [ratio.low, ratio.high],
        "faults": statistics.median(p[0]["faults"] for p in pairs),
        "kernel_s": kernel_s,
        "saved_s": saved_s,
    }
    print(
        f"{row['script']:40} {row['step_s'] * 1e3:7.2f} ms  kept {row['kept_step_s'] * 1e3:7.2f} ms  gain {ratio.value:.2f} "
        f"({ratio.low:.2f} - {ratio.high:.2f})  {row['faults']:6.0f} faults  kernel {kernel_s * 1e3:6.2f} ms  "
        f"saved {saved_s * 1e3:6.2f} ms",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
