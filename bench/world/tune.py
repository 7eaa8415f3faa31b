"""What `flatout tune` makes of other people's scripts: `python bench/world/tune.py CHECKOUTS [--only NAME ...] --out FILE`.

Each training script of the manifest, unchanged, one after the other with nothing beside it (or `--jobs` of them side by side,
each on an equal share of the cores that it has alone):

1. `flatout tune` within the budget, for runs of so many steps as the untouched script takes in `--run-seconds` (or
   `--planned-seconds`): the plan, and whether each lever that was tried got a verdict;
2. the whole run of the steps of `--run-seconds`, process by process in turn, from the start of python to the same step: plainly,
   `flatout run --plan`, the best cure that the expert measured, and the text that `flatout edit` makes of the plan; and what a
   step takes in the second half of these runs, when what is compiled is compiled;
3. what is learnt: the mean of the last losses on three seeds, with the plan beside without it;
4. the later steps of shorter runs with the plan and of its text, in turn: is the text as fast?
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from threading import Lock
from time import monotonic
from typing import Any

from run import environment_of
from scripts import (
    BUILD,
    HERE,
    HOOKS,
    LONGEST_S,
    Script,
    completed,
    edit,
    lay_out,
    machine_of,
    read_manifest,
    shares_of,
)

WORTH = 1.15
"""A cure that gains less is not counted as one that a plan should find."""
SEEDS = (11, 12, 13)
LAST = 0.2
"""The share of a run's losses, at its end, that is averaged."""
_PROBE_S = 6.0
_FEWEST = 20
"""Steps of a run."""
_AS_FAST = 1.05
"""A text that takes up to so many times the steps of its plan is as fast."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--allow", default="bounded", help="the weakest guarantee of a lever, as for `flatout tune`")
    parser.add_argument("--run-seconds", type=float, default=60.0, help="how long the untouched script runs")
    parser.add_argument(
        "--planned-seconds", type=float, default=None, help="how long the runs are that the plan is for; None: as long"
    )
    parser.add_argument(
        "--seed-seconds", type=float, default=15.0, help="how long the runs are that show what is learnt on three seeds"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--edit-rounds", type=int, default=3, help="how often plan and text are run in turn")
    parser.add_argument("--edit-seconds", type=float, default=15.0, help="how long each of these runs is, untouched")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest")
    parser.add_argument("--python", default=str(BUILD / "venv" / "bin" / "python"))
    parser.add_argument(
        "--plans", type=Path, default=BUILD / "plans", help="where plans and what tune printed are kept"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many scripts run side by side")
    parser.add_argument("--no-seeds", action="store_true", help="leave out what is learnt on three seeds")
    parser.add_argument(
        "--seeds-alone",
        action="store_true",
        help="for rows of --out without it, what is learnt with their plans of --plans",
    )
    parser.add_argument("--no-edits", action="store_true", help="leave out the text of the plan")
    parser.add_argument("--commit", default="", help="the commit of this project's code, in a copy without its history")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.out.exists() else {"scripts": []}
    rows = {row["name"]: row for row in before["scripts"]}
    options.plans.mkdir(parents=True, exist_ok=True)
    shares: Queue[list[int]] = Queue()
    for share in shares_of(options.jobs):
        shares.put(share)
    written = Lock()

    def tuned(script: Script) -> None:
        share = shares.get()
        try:
            tuning = Tuning(script, options, share)
            row = tuning.with_losses(rows[script.name]) if options.seeds_alone else tuning.row()
        except (OSError, subprocess.SubprocessError, SystemExit) as e:
            known = rows[script.name] if options.seeds_alone else {}
            row = known | {"name": script.name, "error": f"{type(e).__name__}: {e}"}
        finally:
            shares.put(share)
        if not options.seeds_alone:
            row |= {"flatout_commit": options.commit or _own_commit(), "machine": machine_of(options.python, share)}
        with written:
            rows[script.name] = row
            print(line_of(row), flush=True)
            found = (
                dict(before)
                if options.seeds_alone
                else {
                    "date": datetime.now(UTC).date().isoformat(),
                    "machine": row["machine"],
                    "jobs": options.jobs,
                    "budget": options.budget,
                    "run_seconds": options.run_seconds,
                }
            ) | {
                "summary": summarise(list(rows.values())),
                "scripts": [*rows.values()],
            }
            options.out.write_text(json.dumps(found, indent=1))

    wanted = [
        script
        for script in read_manifest(options.only, options.manifest)
        if script.kind != "inference"
        and (is_without_losses(rows.get(script.name)) if options.seeds_alone else script.name not in rows)
        and (options.only or script.cures)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(tuned, wanted))
    print(json.dumps(summarise(list(rows.values())), indent=1))
    return 0


class Tuning:
    """One script: its plan, and what that is worth over a whole run; all on some cores."""

    def __init__(self, script: Script, options: argparse.Namespace, cores: list[int]) -> None:
        self._script = script
        self._options = options
        self._cores = cores
        self._work = BUILD / "work" / f"{script.name}-tune"
        self._untouched = self._work.parent / f"{self._work.name}.untouched"
        self._plan = options.plans / f"{script.name}.toml"
        self._marks = self._work.parent / f"{self._work.name}.marks"
        self._text_folder = self._work
        """What the files that `flatout edit` changed are named from."""

    def row(self) -> dict[str, Any]:
        script = self._script
        lay_out(script, self._options.checkouts, self._untouched)
        num_steps = self._length(self._fresh())
        planned_s = self._options.planned_seconds or self._options.run_seconds
        taken_s, later_step_s, num_own = self._whole_run(num_steps), self._later_step_s(), len(self._stamps_s())
        is_whole = 0 < num_own < num_steps - 1
        if is_whole:  # the script comes to its own end before
            num_steps = num_own
        elif later_step_s and taken_s < self._options.run_seconds:  # much of the first seconds was no step
            num_steps += int((self._options.run_seconds - taken_s) / later_step_s)
        num_planned = num_steps if is_whole else math.ceil(num_steps * planned_s / self._options.run_seconds)
        found = self._tuned(self._fresh(), num_planned) | {"num_steps": num_steps, "num_planned": num_planned}
        if found.get("plan") is None:
            return found
        sides: dict[str, dict[str, Any]] = {"untouched": {}}
        if found["levers"]:
            sides["plan"] = {"plan": self._plan}
            if not self._options.no_edits:
                found["edit"] = self._edited()
                if found["edit"]["exit"] in (0, 4) and found["edit"]["has_diff"]:
                    sides["edit"] = {"is_edited": True, "environment": found["edit"]["environment"]}
        if cure := max(script.cures, key=lambda c: c.get("measured", 0.0), default=None):
            sides["by hand"] = {"cure": cure}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        later: dict[str, list[float | None]] = {name: [] for name in sides}
        for _ in range(self._options.rounds):
            for name, how in sides.items():
                taken[name].append(self._whole_run(num_steps, **how))
                later[name].append(self._later_step_s())
        found["whole_run_s"], found["later_step_s"] = taken, later
        if "edit" in sides:
            length = math.ceil(num_steps * self._options.edit_seconds / self._options.run_seconds)
            found["edit_race_s"] = self._raced({name: sides[name] for name in ("plan", "edit")}, max(_FEWEST, length))
        return found if self._options.no_seeds else self.with_losses(found)

    def with_losses(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row of a plan, with the last losses of runs on three seeds."""
        if not row["levers"]:
            return row
        planned = [lever["id"] for lever in tomllib.loads(self._plan.read_text())["lever"]]
        if planned != row["levers"]:
            raise SystemExit(f"'{self._plan}' is another plan than the row's")
        if not self._untouched.exists():
            lay_out(self._script, self._options.checkouts, self._untouched)
        num_steps = math.ceil(row["num_steps"] * self._options.seed_seconds / self._options.run_seconds)
        return row | {"losses": self._losses(max(_FEWEST, num_steps))}

    def _raced(self, sides: dict[str, dict[str, Any]], num_steps: int) -> dict[str, list[float]]:
        """Seconds of a later step of both sides, run by run in turn; without runs that failed."""
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(self._options.edit_rounds):
            for name, how in sides.items():
                is_done = math.isfinite(self._whole_run(num_steps, **how))
                step_s = self._later_step_s()
                if is_done and step_s is not None:
                    found[name].append(step_s)
        return found

    def _tuned(self, folder: Path, num_steps: int) -> dict[str, Any]:
        script, record = self._script, self._options.plans / f"{self._script.name}.json"
        for old in (record, self._plan):
            old.unlink(missing_ok=True)
        command = [self._options.python, "-m", "flatout", "tune", "--time-budget", self._options.budget]
        command += ["--run-steps", str(num_steps), "--allow", self._options.allow]
        command += ["--out", str(self._plan), "--json", str(record), *script.named, "--", *script.arguments]
        began = monotonic()
        done = self._run(command, folder, environment_of(script, with_flatout=True))
        (self._options.plans / f"{script.name}.txt").write_text(done.stdout + done.stderr)
        row: dict[str, Any] = {"name": script.name, "repository": script.repository, "commit": script.commit}
        row |= {"tune_s": monotonic() - began, "tune_exit": done.returncode}
        cures = [(c["name"], c["measured"]) for c in script.cures if c.get("measured", 0) >= WORTH]
        row |= {"best_cure": max(cures, key=lambda c: c[1], default=None), "plan": None, "levers": []}
        if not record.exists():
            return row | {"error": (done.stdout + done.stderr)[-600:]}
        found = json.loads(record.read_text())
        tried = [(a, lever) for a in found["attempts"] for lever in judged_in(a)]
        return row | {
            "plan": str(self._plan),
            "levers": [p["id"] for p in found["plan"]["lever"]],
            "guarantee": found["plan"]["guarantee"],
            "claimed": found["plan"].get("measured"),
            "because": found["plan"]["because"],
            "is_complete": found["is_complete"],
            "tried": [
                {
                    "lever": lever,
                    "outcome": a["verdict"]["outcome"],
                    "has_verdict": has_verdict(a["verdict"]),
                    "because": a["verdict"]["because"],
                    "speed": (a["verdict"].get("speed") or {}).get("ratio"),
                }
                for a, lever in tried
            ],
            "left_out": [[one["lever"], one["because"]] for one in found["left_out"] if one["is_for_script"]],
            "pays_from": found["plan"].get("pays_from"),
            "run_start_s": found["plan"].get("run_start_s"),
        }

    def _length(self, folder: Path) -> int:
        """Steps of the whole run: those of `--run-seconds` of the untouched script, by the pace of its first steps."""
        environment = self._environment() | {"WORLD_MARKS": self._fresh_marks(), "WORLD_END_S": str(_PROBE_S)}
        self._run([self._options.python, *self._script.command], folder, environment)
        return max(_FEWEST, math.ceil(len(self._stamps_s()) * self._options.run_seconds / _PROBE_S))

    def _later_step_s(self) -> float | None:
        """Seconds of a step in the second half of the run that has just ended; None of one that took too few."""
        stamps = self._stamps_s()
        half = len(stamps) // 2
        return (stamps[-1] - stamps[half]) / (len(stamps) - 1 - half) if len(stamps) > 8 else None

    def _fresh_marks(self) -> str:
        """Where the next run writes when its steps end."""
        for old in self._marks.parent.glob(f"{self._marks.name}.*"):
            old.unlink()
        return str(self._marks)

    def _stamps_s(self) -> list[float]:
        """When the steps of the last run ended."""
        found = max((p.read_bytes() for p in self._marks.parent.glob(f"{self._marks.name}.*")), key=len, default=b"")
        return [at for key, at in struct.iter_unpack("<Bd", found[: len(found) // 9 * 9]) if key == 0]

    def _environment(self, *, with_flatout: bool = False) -> dict[str, str]:
        return environment_of(self._script, with_flatout=with_flatout) | {"WORLD_TIMER": self._script.timer}

    def _fresh(self) -> Path:
        """The folder of the script in a new copy of what was laid out."""
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._untouched, self._work, symlinks=True)
        return self._work / self._script.folder

    def _run(self, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return completed(command, folder, environment, timeout_s=LONGEST_S, cores=self._cores)

    def _whole_run(
        self,
        num_steps: int,
        *,
        plan: Path | None = None,
        cure: dict[str, Any] | None = None,
        is_edited: bool = False,
        environment: dict[str, str] | None = None,
        extra: dict[str, str] | None = None,
    ) -> float:
        """Seconds from the start of the process to the end of so many steps; inf where it failed."""
        script, folder = self._script, self._fresh()
        wanted = self._environment(with_flatout=plan is not None or is_edited) | (environment or {}) | (extra or {})
        wanted |= {"WORLD_MARKS": self._fresh_marks(), "WORLD_END_STEPS": str(num_steps)}
        command = [self._options.python, *script.command]
        if plan is not None:
            command = [
                self._options.python,
                "-m",
                "flatout",
                "run",
                "--plan",
                str(plan),
                *script.named,
                "--",
                *script.arguments,
            ]
        if cure is not None:
            edit(folder, cure.get("edits", []))
            wanted |= cure.get("environment", {})
            if "apply" in cure:
                wanted["WORLD_CURE"] = str(HOOKS.parent / "cures" / f"{cure['apply']}.py")
        if is_edited:
            text = self._options.plans / f"{script.name}-text"
            for path in text.rglob("*.py"):
                (self._text_folder / path.relative_to(text)).write_bytes(path.read_bytes())
        began = monotonic()
        done = self._run(command, folder, wanted)
        return monotonic() - began if done.returncode == 0 else math.inf

    def _edited(self) -> dict[str, Any]:
        """What `flatout edit` makes of the plan."""
        script, folder = self._script, self._fresh()
        text = self._options.plans / f"{script.name}-text"
        command = [
            self._options.python,
            "-m",
            "flatout",
            "edit",
            "--plan",
            str(self._plan),
            "--out",
            str(text),
            *script.named,
        ]
        done = self._run([*command, "--", *script.arguments], folder, environment_of(script, with_flatout=True))
        named_from = re.search(r"files are named from '(.+?)'", done.stderr)
        own = folder if script.is_module else (folder / script.path).parent
        self._text_folder = Path(named_from[1]) if named_from else own
        started = next((line for line in done.stderr.splitlines() if line.startswith("start it as: ")), "")
        words = [w for w in started.removeprefix("start it as: ").partition(" python ")[0].split() if "=" in w]
        return {
            "exit": done.returncode,
            "has_diff": bool(done.stdout.strip()) or bool(words),
            "environment": dict(word.split("=", 1) for word in words),
            "messages": done.stderr[-600:],
        }

    def _losses(self, num_steps: int) -> dict[str, list[float | None]]:
        """The last losses of runs of so many steps on three seeds: untouched, with other rounding, and with the plan."""
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        sides: dict[str, dict[str, Any]] = {
            "untouched": {},
            "one thread": {"extra": one_thread},
            "plan": {"plan": self._plan},
        }
        return {name: [self._last_loss(num_steps, seed, **how) for seed in SEEDS] for name, how in sides.items()}

    def _last_loss(
        self, num_steps: int, seed: int, *, plan: Path | None = None, extra: dict[str, str] | None = None
    ) -> float | None:
        """The mean of the last losses of a run on one seed."""
        losses = self._work.parent / f"{self._work.name}.losses"
        losses.unlink(missing_ok=True)
        wanted = {"WORLD_LOSSES": str(losses), "WORLD_SEED": str(seed)} | (extra or {})
        self._whole_run(num_steps, plan=plan, extra=wanted)
        data = losses.read_bytes() if losses.exists() else b""
        values = [v for (v,) in struct.iter_unpack("<d", data[: len(data) // 8 * 8])]
        return statistics.fmean(values[-max(1, round(LAST * len(values))) :]) if values else None


def _own_commit() -> str:
    """The commit of this project's code; '' in a copy without its history."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def judged_in(attempt: dict[str, Any]) -> list[str]:
    """The levers that an attempt judges on top of others: one, or several that were tried as one."""
    if attempt["kind"] in ("add", "swap"):
        return [attempt["lever"]]
    before = [planned["id"] for planned in attempt["before"]]
    together = [planned["id"] for planned in attempt["after"] if planned["id"] not in before]
    return together if attempt["kind"] == "together" else []


def has_verdict(verdict: dict[str, Any]) -> bool:
    """Whether it was told if the lever computes the same."""
    return verdict["outcome"] != "unknown" or verdict["equality"]["holds"] is not None


def gain(row: dict[str, Any], side: str) -> float | None:
    """How much sooner a side ended its whole run than the untouched script; None where it did not run."""
    taken = row.get("whole_run_s", {})
    if not taken.get(side) or not all(map(math.isfinite, taken[side])):
        return None
    return min(taken["untouched"]) / min(taken[side])


def step_gain(row: dict[str, Any], side: str) -> float | None:
    """How much sooner a side took its later steps; None where that is not known."""
    later = row.get("later_step_s", {})
    if None in (later.get(side) or [None]) or None in (later.get("untouched") or [None]):
        return None
    return float(min(later["untouched"]) / min(later[side]))


def is_learnt(row: dict[str, Any]) -> bool | None:
    """Whether the plan's last losses lie inside the spread of the untouched script's, half of it wider on both sides.

    That is over seeds, and over the rounding of another number of threads: it moves chaotic steps as far as other seeds do.
    """
    losses = row.get("losses")
    if not losses or any(value is None for values in losses.values() for value in values):
        return None
    untouched = [*losses["untouched"], *losses.get("one thread", ())]
    low, high = min(untouched), max(untouched)
    room = 0.5 * (high - low) + 0.02 * abs(high)
    return all(low - room <= value <= high + room for value in losses["plan"])


def is_as_fast(row: dict[str, Any]) -> bool:
    """Whether the text's later steps take about as long as the plan's, or less."""
    plan, text = (statistics.median(row["edit_race_s"][side]) for side in ("plan", "edit"))
    return text <= _AS_FAST * plan


def is_without_losses(row: dict[str, Any] | None) -> bool:
    """Whether a row has a plan, and nothing on what is learnt with it."""
    return row is not None and bool(row.get("levers")) and "losses" not in row


def line_of(row: dict[str, Any]) -> str:
    if "whole_run_s" not in row:
        return f"{row['name']:28} {row.get('error', row.get('because', ''))[-150:]!r}"
    shown = "  ".join(
        f"{side} {value:.2f}x (later steps {step_gain(row, side) or math.nan:.2f}x)"
        for side in ("plan", "edit", "by hand")
        if (value := gain(row, side))
    )
    claimed = f"claimed {row['claimed'][0]:.2f}x" if row.get("claimed") else "no plan"
    judged = sum(1 for t in row["tried"] if t["has_verdict"])
    return (
        f"{row['name']:28} {row['tune_s']:4.0f} s  {judged}/{len(row['tried'])} verdicts  {claimed}  "
        f"{row['num_steps']} steps: {shown}  "
        f"learnt {is_learnt(row)}  {', '.join(row['levers']) or row['because']}"
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [r for r in rows if "whole_run_s" in r]
    tried = [t for r in ran for t in r["tried"]]
    planned = [r for r in ran if r["levers"]]
    gains = [g for r in planned if (g := gain(r, "plan"))]
    steady = [g for r in planned if (g := step_gain(r, "plan"))]
    worth = [r for r in ran if r["best_cure"]]
    shares = [g / h for r in worth if (g := gain(r, "plan")) and (h := gain(r, "by hand"))]
    learnt = [x for r in planned if (x := is_learnt(r)) is not None]
    edits = [r for r in planned if r.get("edit")]
    raced = [r for r in edits if all(r.get("edit_race_s", {}).get(side) for side in ("plan", "edit"))]
    return {
        "scripts": len(rows),
        "failed": [r["name"] for r in rows if "whole_run_s" not in r],
        "runs that failed": [
            f"{r['name']}, {side}"
            for r in ran
            for side, taken in r["whole_run_s"].items()
            if not all(map(math.isfinite, taken))
        ],
        "levers with a verdict": f"{sum(t['has_verdict'] for t in tried)} of {len(tried)}",
        "plans": f"{len(planned)} of {len(ran)}",
        "plans where a cure gains 1.15x": f"{sum(bool(r['levers']) for r in worth)} of {len(worth)}",
        "gain over the whole run (geometric mean)": statistics.geometric_mean(gains) if gains else None,
        "gain of later steps (geometric mean)": statistics.geometric_mean(steady) if steady else None,
        "of the best cure by hand (geometric mean)": statistics.geometric_mean(shares) if shares else None,
        "plans slower over the run": [
            r["name"] for r in planned if r["whole_run_s"]["plan"] and (gain(r, "plan") or 0.0) < 0.98
        ],
        "plans that learn the same": f"{sum(learnt)} of {len(learnt)}",
        "plans that became a text": f"{sum(r['edit']['exit'] == 0 for r in edits)} of {len(edits)}",
        "texts as fast as the plan": f"{sum(is_as_fast(r) for r in raced)} of {len(raced)}",
    }


if __name__ == "__main__":
    sys.exit(main())
