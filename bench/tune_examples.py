"""What `flatout tune` makes of every slow example: plans, proved again independently, beside `torch.compile(model)` alone.

    python bench/tune_examples.py --out bench/results/<date>-<hardware>/tune_examples.json [--only NAME ...] [--budget 100s]

Three commands for each script, one after the other, nothing beside them:
1. `flatout tune` within the budget, and the plan it writes;
2. `flatout verify plan.toml script`: the same proof again from nothing, on other seeds;
3. a plan with `graph.compile` alone, raced against the untouched script: what `torch.compile(model)` gives, equal or not.
Each row is written as soon as it is there; a run that was stopped goes on with the scripts that are missing. At the end the
table, and how often what a lever did lay within what had been predicted for it. A Markdown table lands beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from operator import sub
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLATOUT = [sys.executable, "-m", "flatout"]
SEED = 77
LONG = 10_000_000
"""Steps of the runs that plans are for: the examples are cut short, and their table tells the gain of a step."""
"""Neither the search nor its final proof run on it."""
COMPILE_ALONE = """
[[lever]]
id = "graph.compile"
guarantee = "bounded"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--budget", default="100s")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each race of the independent proof")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=Path, default=None, help="folder to keep the plans in")
    options = parser.parse_args()
    manifest = tomllib.loads((ROOT / "examples" / "manifest.toml").read_text())
    chosen = [e for e in manifest["example"] if not options.only or e["name"] in options.only]
    unknown = sorted({*(options.only or [])} - {e["name"] for e in chosen})
    if unknown:
        parser.error(f"no examples are called {', '.join(unknown)}; examples/manifest.toml has their names")
    rows = {row["name"]: row for row in json.loads(options.out.read_text())["examples"]} if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for example in chosen:
        if example["name"] in rows and not options.only:
            continue
        rows[example["name"]] = tuned(example, options)
        print(line_of(rows[example["name"]]), flush=True)
        save(options.out, rows)
    save(options.out, rows)
    print("\n" + json.dumps(summary_of(list(rows.values())), indent=1))
    return 0


def tuned(example: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    script = ROOT / "examples" / example["slow"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan, record = folder / "plan.toml", folder / "tuned.json"
        clock = [time.monotonic()]
        said = run(
            [
                *FLATOUT,
                "tune",
                "--time-budget",
                options.budget,
                "--run-steps",
                LONG,
                "--out",
                plan,
                "--json",
                record,
                script,
            ]
        )
        if not record.exists():
            return {"name": example["name"], "rule": example["rule"], "error": said[-600:]}
        found = json.loads(record.read_text())
        clock.append(time.monotonic())
        again = (
            verdict(["--seed", SEED, "--seconds", options.seconds, plan, script], folder)
            if found["plan"]["lever"]
            else None
        )
        clock.append(time.monotonic())
        alone = folder / "compile.toml"
        alone.write_text(COMPILE_ALONE)
        compiled = verdict(["--no-equality", "--seconds", options.seconds, "--timeout", 150, alone, script], folder)
        clock.append(time.monotonic())
        if options.plans is not None and plan.exists():
            options.plans.mkdir(parents=True, exist_ok=True)
            (options.plans / f"{example['name']}.toml").write_bytes(plan.read_bytes())
    return {
        "name": example["name"],
        "rule": example["rule"],
        "levers": [
            {k: planned.get(k) for k in ("id", "parameters", "predicted", "measured", "guarantee")}
            for planned in found["plan"]["lever"]
        ],
        "tuned": found["plan"].get("measured"),
        "again": again,
        "compiled": compiled,
        "left_out": found["left_out"],
        "is_complete": found["is_complete"],
        "budget": options.budget,
        "took_s": dict(zip(("tune", "verify", "compile"), map(round, map(sub, clock[1:], clock)), strict=True)),
        "attempts": [attempt_of(a) for a in found["attempts"] if a["kind"] == "add"],
    }


def attempt_of(attempt: dict[str, Any]) -> dict[str, Any]:
    """What was predicted for a lever that was tried, and what it did."""
    speed = attempt["verdict"].get("speed")
    return {
        "lever": attempt["lever"],
        "predicted": attempt["after"][-1].get("predicted"),
        "measured": [speed[k] for k in ("ratio", "low", "high")] if speed else None,
        "outcome": attempt["verdict"]["outcome"],
        "because": attempt["verdict"].get("because", ""),
    }


def verdict(arguments: list[Any], folder: Path) -> dict[str, Any]:
    """What `flatout verify` says, shortened."""
    path = folder / "verdict.json"
    path.unlink(missing_ok=True)
    said = run([*FLATOUT, "verify", "--json", path, *arguments])
    if not path.exists():
        return {"outcome": "error", "because": said[-400:], "speed": None}
    found = json.loads(path.read_text())
    speed = found.get("speed")
    return {
        "outcome": found["outcome"],
        "because": found.get("because", ""),
        "holds": found["equality"]["holds"],
        "guarantee": found["equality"]["guarantee"],
        "worst": found["equality"].get("worst"),
        "speed": [speed[k] for k in ("ratio", "low", "high")] if speed else None,
        "step_s": [speed["before_s"], speed["after_s"]] if speed else None,
    }


def run(command: list[Any]) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return (done.stdout + done.stderr).strip()


def gain(row: dict[str, Any]) -> float:
    """Over the untouched script, by the independent proof; 1 for an empty plan."""
    again = row.get("again")
    return again["speed"][0] if again and again["speed"] else 1.0


def gain_of_compile(row: dict[str, Any]) -> float:
    compiled = row.get("compiled")
    return compiled["speed"][0] if compiled and compiled["speed"] else 1.0


def is_wrong(row: dict[str, Any]) -> bool:
    again = row.get("again")
    return again is not None and again["outcome"] in ("different", "error")


def is_slower(row: dict[str, Any]) -> bool:
    again = row.get("again")
    return again is not None and bool(again["speed"]) and again["speed"][2] < 1


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in rows if "error" not in row]
    tried = [a for row in rows for a in row["attempts"] if a["measured"] and a["predicted"]]
    by_lever: dict[str, list[bool]] = {}
    for attempt in tried:
        by_lever.setdefault(attempt["lever"], []).append(is_within(attempt))
    return {
        "num_examples": len(rows),
        "num_plans": sum(bool(row["levers"]) for row in rows),
        "num_wrong": sum(map(is_wrong, rows)),
        "num_slower": sum(map(is_slower, rows)),
        "geomean_over_untouched": mean_of([gain(r) for r in rows]),
        "geomean_over_best_of_eager_and_compile": mean_of([gain(r) / max(1.0, gain_of_compile(r)) for r in rows]),
        "num_levers_tried": len(tried),
        "within_prediction": statistics.fmean(map(is_within, tried)) if tried else None,
        "within_prediction_by_lever": {k: f"{sum(v)} of {len(v)}" for k, v in sorted(by_lever.items())},
        "torch": version_of("torch"),
        "python": platform.python_version(),
    }


def is_within(attempt: dict[str, Any]) -> bool:
    """Whether the interval that was measured and the range that was predicted have a point in common."""
    (low, high), (_, least, most) = attempt["predicted"], attempt["measured"]
    return bool(least <= high and most >= low)


def mean_of(ratios: list[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios and all(math.isfinite(r) and r > 0 for r in ratios) else None


def version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:22} ERROR {row['error']}"
    again = row["again"]
    state = again["outcome"] if again else "empty plan"
    names = ", ".join(lever["id"] for lever in row["levers"])
    return f"{row['name']:22} {gain(row):5.2f}x {state:10} compile alone {gain_of_compile(row):5.2f}x  {names}"


def save(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    ordered = [rows[name] for name in sorted(rows)]
    summary = summary_of(ordered)
    beside = out.with_suffix(".part")
    beside.write_text(json.dumps({"summary": summary, "examples": ordered}, indent=1).replace(f"{ROOT}/", "") + "\n")
    beside.replace(out)
    out.with_suffix(".md").write_text(table_of(ordered, summary))


def table_of(rows: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    lines = [
        "# Every slow example, tuned",
        "",
        f"Made by `bench/tune_examples.py`; torch {summary['torch']}, Python {summary['python']}. Ratios of seconds a step, "
        "untouched over changed, medians with 95 % intervals of interleaved stretches; measured again after the search.",
        "",
        "| script | speed-up | `torch.compile(model)` | guarantee | plan | left out |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | | | | error | {cell(row['error'])} |")
            continue
        again = row["again"]
        speed = "1 (empty plan)"
        if again and again["speed"]:
            speed = "{:.2f} ({:.2f} - {:.2f})".format(*again["speed"])
            speed += "" if again["outcome"] == "proved" else f" {again['outcome']}"
        compiled = f"{gain_of_compile(row):.2f}" if row["compiled"]["speed"] else cell(row["compiled"]["because"][:80])
        plan = ", ".join(
            lever["id"] + (" ({:.2f})".format(lever["measured"][0]) if lever["measured"] else "")
            for lever in row["levers"]
        )
        left = "; ".join(f"{lever}: {because}" for lever, because in pairs(row["left_out"]))
        kept = again["guarantee"] if again and again.get("guarantee") else ""
        lines.append(f"| {row['name']} | {speed} | {compiled} | {kept} | {plan} | {cell(left)} |")
    over, best = summary["geomean_over_untouched"], summary["geomean_over_best_of_eager_and_compile"]
    lines += [
        "",
        f"Geometric means over {summary['num_examples']} scripts: {over or 0:.2f} over the untouched script, "
        f"{best or 0:.2f} over the better of eager and `torch.compile(model)`. "
        f"Plans that are wrong: {summary['num_wrong']}; slower: {summary['num_slower']}.",
        "",
        f"What a lever did lay within what had been predicted in {100 * (summary['within_prediction'] or 0):.0f} % of "
        f"{summary['num_levers_tried']} trials:",
        "",
        "| lever | within |",
        "|---|---|",
        *(f"| {lever} | {share} |" for lever, share in summary["within_prediction_by_lever"].items()),
        "",
    ]
    return "\n".join(lines)


def pairs(left_out: list[Any]) -> list[tuple[str, str]]:
    return [(one["lever"], one["because"]) if isinstance(one, dict) else (one[0], one[1]) for one in left_out]


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
