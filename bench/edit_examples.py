"""What `flatout edit` makes of the plans of the slow examples: scripts that run alone, proved, beside their plans.

    python bench/edit_examples.py --plans FOLDER --out bench/results/<date>-<hardware>/edit_examples.json [--only NAME ...]

FOLDER holds the plans that `bench/tune_examples.py --plans` wrote. For each: `flatout edit` into a copy of the examples; the
edited script against the untouched one (a Verdict, on a seed of its own); the edited script against the plan, raced. What no edit
can do stays in a plan of the rest, with which the edited script is then run. A Markdown table lands beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flatout.app.plans import environment_of, precision_of_plan, read_plan
from flatout.core.errors import FlatoutError
from flatout.core.files import write_whole_file
from flatout.core.records.plan import to_toml
from flatout.core.records.verdict import Verdict
from flatout.tune.edits import edits
from flatout.tune.verify.proof import prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

ROOT = Path(__file__).resolve().parents[1]
SLOW = ROOT / "examples" / "slow"
SEED = 78
NOISE = 0.97
"""An edited script may be this much slower than its plan, as the medians of two processes that run the same often are."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {r["name"]: r for r in json.loads(options.out.read_text())["examples"]} if options.out.exists() else {}
    for path in sorted(options.plans.glob("*.toml")):
        plan = read_plan(path)
        if (
            not plan.lever
            or (options.only and path.stem not in options.only)
            or (path.stem in rows and not options.only)
        ):
            continue
        try:
            rows[path.stem] = edited(path, options.seconds)
        except FlatoutError as e:
            rows[path.stem] = {"name": path.stem, "outcome": "error", "because": str(e)[:400]}
        print(json.dumps({k: v for k, v in rows[path.stem].items() if k != "left"}), flush=True)
        save(options.out, [rows[name] for name in sorted(rows)])
    return 0


def edited(path: Path, seconds: float) -> dict[str, Any]:
    plan, script = read_plan(path), SLOW / f"{path.stem}.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SLOW, folder, dirs_exist_ok=True)
        edited = edits(plan, script)
        edited.write(folder)
        rest = folder / "rest.toml"
        after = Request(target=str(folder / script.name))
        if edited.rest.lever:
            write_whole_file(rest, to_toml(edited.rest))
            after = planned(folder / script.name, rest)
        terms = ProofTerms(budget_s=seconds, seed=SEED, at=precision_of_plan(plan))
        proof = prove_script(Request(target=str(script)), after, terms)
        race = prove_script(planned(script, path), after, ProofTerms(budget_s=seconds, is_compared=False))
    return {
        "name": path.stem,
        "levers": [p.id for p in plan.lever],
        "left": [p.id for p in edited.rest.lever],
        "outcome": proof.outcome,
        "because": proof.because,
        "over_untouched": ratio_of(proof),
        "over_plan": ratio_of(race),
        "keeps_speed": race.speed is not None and race.speed.high >= NOISE,
    }


def planned(script: Path, plan: Path) -> Request:
    return Request(target=str(script), plan=str(plan), environment=environment_of(read_plan(plan)))


def ratio_of(verdict: Verdict) -> list[float] | None:
    speed = verdict.speed
    return [round(v, 3) for v in (speed.ratio, speed.low, speed.high)] if speed is not None else None


def save(out: Path, rows: list[dict[str, Any]]) -> None:
    whole = [r for r in rows if r["outcome"] == "proved" and not r["left"]]
    ratios = [r["over_plan"][0] for r in rows if r.get("over_plan")]
    summary = {
        "num_edited": len(rows),
        "num_proved": sum(r["outcome"] == "proved" for r in rows),
        "num_proved_as_text_alone": len(whole),
        "num_that_keep_the_plans_speed": sum(bool(r.get("keeps_speed")) for r in rows),
        "geomean_over_plan": statistics.geometric_mean(ratios) if ratios else None,
        "torch": str(torch.__version__),
    }
    beside = out.with_suffix(".part")
    beside.write_text(json.dumps({"summary": summary, "examples": rows}, indent=1).replace(f"{ROOT}/", "") + "\n")
    beside.replace(out)
    lines = [
        "# Plans as text",
        "",
        "Made by `bench/edit_examples.py`: what `flatout edit` wrote, against the untouched script (proved on a seed of its own) "
        "and against the plan (1: as fast). Medians with 95 % intervals.",
        "",
        "| script | edited levers | left in a plan | outcome | over untouched | over the plan |",
        "|---|---|---|---|---|---|",
        *map(line_of, rows),
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(lines))


def line_of(row: dict[str, Any]) -> str:
    if row["outcome"] == "error":
        return f"| {row['name']} | | | error: {row['because']} | | |"
    cells = ["{:.2f} ({:.2f} - {:.2f})".format(*row[k]) if row[k] else "" for k in ("over_untouched", "over_plan")]
    text = [lever for lever in row["levers"] if lever not in row["left"]]
    return (
        f"| {row['name']} | {', '.join(text)} | {', '.join(row['left'])} | {row['outcome']} | {cells[0]} | {cells[1]} |"
    )


if __name__ == "__main__":
    sys.exit(main())
