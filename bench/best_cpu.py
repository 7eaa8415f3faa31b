"""Plans of `flatout tune` against torch.compile, on ten scripts that other people wrote: whole runs on a CPU, compiling included.

    python bench/best_cpu.py CHECKOUTS OUT [--only NAME ...] [--run-seconds 60] [--rounds 3]

CHECKOUTS and the environment are those of bench/world (its README says how to make them). Of the manifest's small models these
are ten kinds that beginners and papers start from: a convolutional net, a feed-forward one, a VAE, a GAN, recurrent nets on
digits and on words, two transformers, a graph network and a policy gradient, each from a repository with many stars.

Each script makes so many steps as it takes untouched in `--run-seconds`. In the first round it runs untouched, with the plan, and
with each peer; in the rounds after that untouched, with the plan, and with the peer that was fastest in the first, in turn, so
that the peer is not the luckiest of several. A run is a process, from its start to the end of its last step, with empty caches of
compiled code on every side. Peers compile each outermost module at its first call. (Of torch.compile's modes, reduce-overhead
records CUDA graphs and is the default on a CPU.) Compiling in bfloat16 is left out where products in bfloat16 are no faster than
in float32: on CPUs without units for it they take several times as long.

Rows that OUT has already are not run again. A longer run is worked out from the same processes: its later steps take what they
took in the second half.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "world"))

from scripts import BUILD, HERE, Script, lay_out, machine_of, read_manifest, shares_of
from tune import Tuning, _own_commit

SCRIPTS = (
    "examples-mnist",
    "examples-vae",
    "examples-mnist-rnn",
    "examples-word-lstm",
    "examples-reinforce",
    "makemore-transformer",
    "mingpt-adder",
    "gan",
    "yunjey-feedforward",
    "pyg-gcn",
)
BFLOAT16 = "compile, bfloat16"
PEERS: dict[str, dict[str, Any]] = {
    "compile": {"cure": {"apply": "compile"}},
    "compile, max-autotune": {"cure": {"apply": "compile"}, "extra": {"WORLD_COMPILE_MODE": "max-autotune"}},
    BFLOAT16: {"cure": {"apply": "bfloat16_compile"}},
}
_PRODUCTS = """
import time, torch
def seconds(dtype):
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    found = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        found.append(time.perf_counter() - start)
    return sorted(found)[6]
print(seconds(torch.bfloat16) / seconds(torch.float32))
"""
LONG_S = 600.0
"""Seconds of the longer run, untouched."""


class Race(Tuning):
    """One script: its plan, and whole runs of all sides in turn."""

    def row(self) -> dict[str, Any]:
        script, options = self._script, self._options
        lay_out(script, options.checkouts, self._untouched)
        num_steps = self._length(self._fresh())
        taken_s, later_s, num_own = self._whole_run(num_steps), self._later_step_s(), len(self._stamps_s())
        if 0 < num_own < num_steps - 1:  # the script comes to its own end before
            num_steps = num_own
        elif later_s and taken_s < options.run_seconds:  # much of the first seconds was no step
            num_steps += int((options.run_seconds - taken_s) / later_s)
        found = self._tuned(self._fresh(), num_steps) | {"num_steps": num_steps}
        if found["plan"] is None:
            return found
        plan: dict[str, Any] = {"plan": {"plan": self._plan}} if found["levers"] else {}
        sides = {"untouched": {}} | plan | peers_of(options)
        taken: dict[str, list[float]] = {name: [] for name in sides}
        later: dict[str, list[float | None]] = {name: [] for name in sides}
        for number in range(options.rounds):
            if number == 1:
                found["peer"] = min((name for name in sides if name in PEERS), key=lambda name: taken[name][0])
                sides = {name: how for name, how in sides.items() if name not in PEERS or name == found["peer"]}
            for name, how in sides.items():
                taken[name].append(self._cold_run(num_steps, how))
                later[name].append(self._later_step_s())
        return found | {"whole_run_s": taken, "later_step_s": later}

    def _cold_run(self, num_steps: int, how: dict[str, Any]) -> float:
        """Seconds of a run whose compiled code is not there yet."""
        cache = self._work.parent / f"{self._work.name}.compiled"
        shutil.rmtree(cache, ignore_errors=True)
        extra = how.get("extra", {}) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        return self._whole_run(num_steps, **(how | {"extra": extra}))


def peers_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The peers that may be the fastest here."""
    return {name: how for name, how in PEERS.items() if name != BFLOAT16 or options.bfloat16_over_float32 < 1}


def bfloat16_over_float32(python: str) -> float:
    """How long a product in bfloat16 takes, one in float32 taken as 1."""
    return float(subprocess.run([python, "-c", _PRODUCTS], check=True, capture_output=True, text=True).stdout)


def ratios(row: dict[str, Any], than: str) -> list[float]:
    """How much sooner the plan ended than another side, in each round after the first; without a plan the script is untouched."""
    own = "plan" if row["levers"] else "untouched"
    taken = row["whole_run_s"]
    return [other / mine for mine, other in list(zip(taken[own], taken[than], strict=False))[1:]]


def later_ratio(row: dict[str, Any], than: str) -> float | None:
    """The same of steps in the second half of a run, medians."""
    own = "plan" if row["levers"] else "untouched"
    mine, other = ([x for x in row["later_step_s"][name] if x] for name in (own, than))
    return statistics.median(other) / statistics.median(mine) if mine and other else None


def long_ratio(row: dict[str, Any], than: str) -> float | None:
    """The same of a run that takes LONG_S untouched: steps that are made besides take what later steps took."""
    own = "plan" if row["levers"] else "untouched"
    untouched_s = statistics.median(x for x in row["later_step_s"]["untouched"] if x)
    more = max(0.0, LONG_S - statistics.median(row["whole_run_s"]["untouched"])) / untouched_s

    def seconds(name: str) -> float | None:
        later = [x for x in row["later_step_s"][name] if x]
        return statistics.median(row["whole_run_s"][name]) + more * statistics.median(later) if later else None

    mine, other = seconds(own), seconds(than)
    return other / mine if mine and other else None


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the scripts; the interval holds nine of ten draws of scripts and rounds."""
    raced = [row for row in rows if row.get("peer") and all(map(math.isfinite, ratios(row, row["peer"])))]
    if not raced:
        return {"scripts": 0}
    logs = [[math.log(x) for x in ratios(row, row["peer"])] for row in raced]
    rng = random.Random(0)
    draws = sorted(
        statistics.fmean(rng.choice(rng.choice(logs)) for _ in logs)  # scripts and rounds drawn with replacement
        for _ in range(2000)
    )
    long = [x for row in raced if (x := long_ratio(row, row["peer"]))]
    return {
        "scripts": len(raced),
        "sooner_than_best_compile": math.exp(statistics.fmean(map(statistics.fmean, logs))),
        "interval": [math.exp(draws[100]), math.exp(draws[1899])],
        "sooner_than_untouched": statistics.geometric_mean(
            [statistics.geometric_mean(ratios(row, "untouched")) for row in raced]
        ),
        f"sooner_than_best_compile_{LONG_S:.0f}_s": statistics.geometric_mean(long) if long else None,
    }


def line_of(row: dict[str, Any]) -> str:
    """One row for a terminal."""
    if not row.get("peer"):
        return f"{row['name']:22} {str(row.get('error', 'no plan'))[-150:]}"
    first = {name: round(taken[0], 1) for name, taken in row["whole_run_s"].items()}
    over_peer, over_plain = ([round(x, 2) for x in ratios(row, than)] for than in (row["peer"], "untouched"))
    later = later_ratio(row, row["peer"]) or math.nan
    return (
        f"{row['name']:22} {over_peer} of '{row['peer']}', {over_plain} of untouched, later steps {later:.2f}; "
        f"first round {first}; {', '.join(row['levers']) or row['because']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS))
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--allow", default="bounded", help="the weakest guarantee of a lever, as for `flatout tune`")
    parser.add_argument("--run-seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3, help="the first chooses the peer, and does not count")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest")
    parser.add_argument("--python", default=str(BUILD / "venv" / "bin" / "python"))
    parser.add_argument("--plans", type=Path, default=BUILD / "plans")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: give 2 or more, the first does not count")
    rows = {row["name"]: row for row in json.loads(options.out.read_text())["rows"]} if options.out.exists() else {}
    options.plans.mkdir(parents=True, exist_ok=True)
    (cores,) = shares_of(1)
    options.bfloat16_over_float32 = bfloat16_over_float32(options.python)
    scripts: dict[str, Script] = {script.name: script for script in read_manifest(options.only, options.manifest)}
    for name in options.only:
        if name in rows:
            continue
        try:
            row = Race(scripts[name], options, cores).row()
        except (OSError, SystemExit) as e:
            row = {"name": name, "levers": [], "error": f"{type(e).__name__}: {e}"}
        rows[name] = row | {"flatout_commit": _own_commit()}
        print(line_of(row), flush=True)
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine_of(options.python, cores),
            "budget": options.budget,
            "run_seconds": options.run_seconds,
            "bfloat16_over_float32": round(options.bfloat16_over_float32, 2),
            "summary": summarise(list(rows.values())),
            "rows": list(rows.values()),
        }
        options.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(summarise(list(rows.values())), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
