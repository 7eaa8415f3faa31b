"""Is flatout right? Every slow example against its repaired twin, and the clean controls.

    python bench/check_examples.py [--only NAME ...] [--rounds 2] [--seconds 8] [--manifest FILE] [--out bench/results/...]
                                   [--reports FOLDER]

For each slow example: is the cause named first, is the line exact, and does the predicted gain agree with the gain of the twin,
measured by bench/step_time.py on interleaved runs (the mean step, evaluation passes included). A prediction is the geometric mean
of the gain's two ends; it agrees when it lies within 25 % of the measured gain. `--again RUN --reports FOLDER --pool RUN ...`
judges the reports of a run by today's rules, and by the gains that all of these runs measured.

For each control, in which nothing is wrong: what a finding claims. That another precision would be faster can be true of any
script, so that claim is put to the test: it is borne out when it lies within 25 % of what autocast gains the control.

Scripts of your own are judged with a manifest beside them, written as examples/manifest.toml is.
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
import tomllib
from pathlib import Path
from typing import Any

from flatout.app.session import diagnose_all
from flatout.core.records.evidence import Evidence
from flatout.core.records.record import from_json, to_json

ROOT = Path(__file__).resolve().parents[1]
WITHIN = 0.25
CURES = {"compute.mixed-precision": ROOT / "bench" / "world" / "cures" / "bfloat16.py"}
"""What is done to a control whose report claims that it would gain."""
MEMORY_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Some controls do take memory anew in every step (capacity.fresh-pages); a script cannot say otherwise before it starts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "manifest.toml")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--reports", type=Path, default=None, help="folder to keep every report in, as JSON")
    parser.add_argument("--again", type=Path, default=None, help="judge this run once more instead of making one")
    parser.add_argument("--pool", nargs="*", type=Path, default=[], help="runs whose measured gains count too")
    options = parser.parse_args()
    manifest, folder = tomllib.loads(options.manifest.read_text()), options.manifest.resolve().parent
    if options.again is not None and options.reports is None:
        parser.error("--again judges saved reports: name their folder with --reports")
    if options.again is not None:
        return judge_again(options, manifest["example"], folder)
    chosen = [e for e in manifest["example"] if not options.only or e["name"] in options.only]
    rows = [judge(e, folder, options) for e in chosen]
    controls = [] if options.only or options.no_controls else manifest.get("control", [])
    clean = [judge_control(c, folder, options) for c in controls]
    summary = summarise(rows, clean)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"summary": summary, "examples": rows, "controls": clean}, indent=1) + "\n")
    return 0


def judge(example: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    report = check(folder / example["slow"], options)
    timings = [(step_s(folder / example["slow"]), step_s(folder / example["fast"])) for _ in range(options.rounds)]
    per = example.get("samples_fast", 1) / example.get("samples_slow", 1)
    row = judged(example, folder, report, [slow / fast * per for slow, fast in timings])
    tell(row)
    return row


def judged(example: dict[str, Any], folder: Path, report: dict[str, Any], ratios: list[float]) -> dict[str, Any]:
    """What a report is worth, by the gains that were measured of the twin."""
    finding = report["findings"][0] if report["findings"] else None
    place = folder / example.get("in", example["slow"])
    lines = {
        number
        for number, text in enumerate(place.read_text().splitlines(), 1)
        if any(snippet in text for snippet in example["lines_contain"])
    }
    accepted = {example["rule"], *example.get("also", [])}
    measured = statistics.geometric_mean(ratios)
    predicted = gain_of(finding) if finding else 1.0
    return {
        "name": example["name"],
        "rule": example["rule"],
        "named": finding["rule"] if finding else None,
        "cause_first": bool(finding and finding["rule"] in accepted),
        "line": finding["line"] if finding else None,
        "line_exact": bool(
            finding and Path(finding["file"]).parts[-2:] == place.parts[-2:] and finding["line"] in lines
        ),
        "expected_lines": sorted(lines),
        "gain": finding["gain"] if finding else None,
        "predicted": predicted,
        "measured": measured,
        "measured_by_round": ratios,
        "agrees": abs(predicted / measured - 1) <= WITHIN,
        "step_s": report["evidence"]["steps"]["step_s"],
        "observing": report["evidence"]["observing"],
        "all": [(f["rule"], f["line"], f["gain"]) for f in report["findings"]],
    }


def tell(row: dict[str, Any]) -> None:
    yes = {True: "yes", False: "NO "}
    print(
        f"{row['name']:22} {row['rule']:32} first {yes[row['cause_first']]} line {yes[row['line_exact']]} "
        f"({row['line']}) predicted {row['predicted']:5.2f} measured {row['measured']:5.2f} agrees {yes[row['agrees']]}"
        + ("" if row["cause_first"] else f"  named {row['named']}"),
        flush=True,
    )


def gain_of(finding: dict[str, Any]) -> float:
    """The middle of what is predicted; of advice (a larger batch), for the same number of samples."""
    low, high = finding["throughput"] if finding["advice"] else finding["gain"]
    return math.sqrt(low * high)


def judge_again(options: argparse.Namespace, examples: list[dict[str, Any]], folder: Path) -> int:
    """Judge a run by the gains that several runs measured, and its reports by today's rules.

    What twins gain scatters from run to run.
    """
    saved = json.loads(options.again.read_text())
    rounds: dict[str, list[float]] = {}
    for path in (options.again, *options.pool):
        for row in json.loads(path.read_text())["examples"]:
            rounds.setdefault(row["name"], []).extend(row["measured_by_round"])
    rows = []
    for example in (e for e in examples if e["name"] in rounds):
        report = diagnosed_again(options.reports / f"{Path(example['slow']).stem}.json")
        rows.append(judged(example, folder, report, rounds[example["name"]]))
        tell(rows[-1])
    summary = summarise(rows, saved["controls"])
    if options.out is not None:
        result = {"summary": summary, "examples": rows, "controls": saved["controls"]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def diagnosed_again(path: Path) -> dict[str, Any]:
    """A saved report with what today's rules find in its evidence."""
    report = json.loads(path.read_text())
    evidence = from_json(json.dumps(report["evidence"]), Evidence)
    return report | {"findings": json.loads(to_json(diagnose_all(evidence)))["findings"]}


def judge_control(control: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    script = folder / control["path"]
    report = check(script, options, environment=MEMORY_KEPT)
    claims = [claim_on(script, finding, options.rounds) for finding in report["findings"]]
    told = (
        f"{c['rule']} at line {c['line']}, predicted {c['predicted']:.2f}, measured "
        + (f"{c['measured']:.2f}" if c["measured"] else "nothing")
        + ("" if c["is_borne_out"] else " NO ")
        for c in claims
    )
    print(f"{control['name']:22} control: {'; '.join(told) or 'nothing claimed'}", flush=True)
    return {"name": control["name"], "claims": claims, "observing": report["evidence"]["observing"]}


def claim_on(script: Path, finding: dict[str, Any], num_rounds: int) -> dict[str, Any]:
    """A claim, with what its cure gains where there is one to apply from outside."""
    measured, cure = None, CURES.get(finding["rule"])
    if cure is not None:
        pairs = [
            (step_s(script, environment=MEMORY_KEPT), step_s(script, cure=cure, environment=MEMORY_KEPT))
            for _ in range(num_rounds)
        ]
        measured = statistics.geometric_mean(before / after for before, after in pairs)
    predicted = gain_of(finding)
    return {
        "rule": finding["rule"],
        "line": finding["line"],
        "share": finding["share"],
        "gain": finding["gain"],
        "predicted": predicted,
        "measured": measured,
        "is_borne_out": measured is not None and abs(predicted / measured - 1) <= WITHIN,
    }


def summarise(rows: list[dict[str, Any]], clean: list[dict[str, Any]]) -> dict[str, Any]:
    n = max(1, len(rows))
    fractions = [r["observing"]["light_fraction"] for r in rows + clean]
    summary = {
        "num_examples": len(rows),
        "cause_first": sum(r["cause_first"] for r in rows) / n,
        "line_exact": sum(r["line_exact"] for r in rows) / n,
        "gain_within_25_percent": sum(r["agrees"] for r in rows) / n,
        "controls": len(clean),
        "controls_with_claims": sum(bool(c["claims"]) for c in clean),
        "controls_with_wrong_claims": sum(not all(claim["is_borne_out"] for claim in c["claims"]) for c in clean),
        "light_fraction_median": statistics.median(fractions),
        "light_fraction_worst": max(fractions),
        "deep_and_trials_worst_s": max(
            r["observing"]["deep_s"] + r["observing"]["trials_s"] + r["observing"]["other_s"] for r in rows + clean
        ),
    }
    print()
    for key, value in summary.items():
        print(f"{key:28} {value:.3g}")
    return summary


def check(script: Path, options: argparse.Namespace, *, environment: dict[str, str] | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-c", "from flatout.app.cli import main; main()", "check"]
        rest = ["--json", str(out), "--seconds", str(options.seconds), str(script)]
        subprocess.run([*command, *rest], stdout=subprocess.DEVNULL, check=False, env=os.environ | (environment or {}))
        if not out.exists():
            raise SystemExit(f"flatout check {script} wrote no report")
        if options.reports is not None:
            options.reports.mkdir(parents=True, exist_ok=True)
            (options.reports / f"{script.stem}.json").write_text(out.read_text())
        return json.loads(out.read_text())


def step_s(script: Path, *, cure: Path | None = None, environment: dict[str, str] | None = None) -> float:
    with_cure = ["--cure", str(cure)] if cure is not None else []
    command = [sys.executable, str(ROOT / "bench" / "step_time.py"), *with_cure, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | (environment or {}))
    return json.loads(done.stdout.strip().splitlines()[-1])["mean_s"]


if __name__ == "__main__":
    sys.exit(main())
