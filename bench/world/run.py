"""`flatout check` on scripts that other people wrote: `python bench/world/run.py CHECKOUTS [--only NAME ...]`.

CHECKOUTS is a folder of repositories (OWNER/NAME, OWNER+NAME or NAME: a git folder that has the manifest's commit, or plain
files). Each script runs unchanged, twice: plainly under a timer of its own, and under `flatout check` with the same timer in the
same process. One row a script: exit, seconds, whether the steps are right, findings, laws broken, the share that stays
unexplained, and how the findings compare with the cures that an expert measured (`measure.py`).

The scripts need what `requirements.txt` lists; `make world` makes that environment in build/world/venv.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from time import monotonic
from typing import Any

from laws import broken_laws
from scripts import BUILD, HERE, HOOKS, ROOT, Script, completed, lay_out, median, read_manifest, stamps_of, step_times

STEPS_WITHIN = 0.10
"""A step is right when `check` and the plain timer in the same process differ by at most this share."""
GAIN_WITHIN = 0.25
WORTH = 1.15
"""A measured cure counts as one that `check` should name from this gain on."""
LONGEST_S = 240.0
_FIRST = 8
"""So many steps pass before `check` times the first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", default=None, help="names of scripts or repositories")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long check observes")
    parser.add_argument(
        "--plain-seconds", type=float, default=8.0, help="how long the plain run is timed; 0 leaves it out"
    )
    parser.add_argument(
        "--lanes", type=int, default=1, help="scripts at a time, each on a core of its own; 0: one, on all cores"
    )
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest", help="another folder of manifest files")
    parser.add_argument("--python", default=str(BUILD / "venv" / "bin" / "python"))
    parser.add_argument("--reports", type=Path, default=BUILD / "reports")
    parser.add_argument(
        "--again", action="store_true", help="judge the reports that are there by today's rules instead of running"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run only scripts without a report, and judge the others"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the rows without their reports as JSON")
    options = parser.parse_args()
    scripts = read_manifest(options.only, options.manifest)
    lanes: Queue[int | None] = Queue()
    for lane in range(options.lanes) or [None]:
        lanes.put(lane)

    def run(script: Script) -> dict[str, Any]:
        lane = lanes.get()
        try:
            row = judge(script, options, lane)
        except (OSError, subprocess.SubprocessError, SystemExit) as e:
            row = {"name": script.name, "repository": script.repository, "error": f"{type(e).__name__}: {e}"}
        finally:
            lanes.put(lane)
        print(line_of(row), flush=True)
        return row

    with ThreadPoolExecutor(max(1, options.lanes)) as pool:
        rows = list(pool.map(run, scripts))
    summary = summarise(rows)
    print()
    for key, value in summary.items():
        print(f"{key:36} {value}")
    if options.out:
        options.out.write_text(json.dumps(result_of(rows, summary, scripts), indent=1) + "\n")
    return 0


def result_of(rows: list[dict[str, Any]], summary: dict[str, Any], scripts: list[Script]) -> dict[str, Any]:
    """What `--out` writes: the rows without their reports, on which machine they were taken, and with what licence."""
    machines = [r["report"]["evidence"]["machine"] for r in rows if r.get("report")]
    fields = ("device_name", "cpu_model", "num_cores", "num_threads", "torch_version")
    by_name = {script.name: script for script in scripts}
    return {
        "date": max((m["measured_at"][:10] for m in machines), default=datetime.now(UTC).date().isoformat()),
        "machine": {name: machines[0][name] for name in fields} if machines else {},
        "summary": summary,
        "scripts": [
            {key: value for key, value in row.items() if key not in ("report", "tail")}
            | {"path": by_name[row["name"]].path, "licence": by_name[row["name"]].licence}
            for row in rows
        ],
    }


def judge(script: Script, options: argparse.Namespace, lane: int | None) -> dict[str, Any]:
    options.reports.mkdir(parents=True, exist_ok=True)
    saved = options.reports / f"{script.name}.json"
    row: dict[str, Any] = {
        "name": script.name,
        "repository": script.repository,
        "commit": script.commit,
        "kind": script.kind,
    }
    if options.again or options.missing:
        before = json.loads(saved.read_text()) if saved.exists() else row | {"error": "not run"}
        if options.again and before.get("report"):
            before["report"] = diagnosed_again(before["report"])
        if options.again or before.get("report"):
            return before | findings_of(before.get("report"), script)
    if options.plain_seconds:
        times, _, _ = timed(script, options, lane, seconds=options.plain_seconds, name="plain")
        row["plain_step_s"] = median(times)
    report_path = BUILD / "work" / f"{script.name}.report.json"
    report_path.unlink(missing_ok=True)
    command = ["-m", "flatout.app.cli", "check", "--quiet", "--seconds", str(options.seconds), "--stop"]
    command += ["--json", str(report_path)]
    began = monotonic()
    times, code, tail = timed(script, options, lane, seconds=0, name="check", before=command)
    row |= {"exit": code, "seconds": monotonic() - began, "timer_step_s": median(times), "tail": tail}
    report = json.loads(report_path.read_text()) if report_path.exists() else None
    if report is not None:
        steps = report["evidence"]["steps"]
        row["timer_same_steps_s"] = median(times[: steps["num_timed"] + _FIRST][_FIRST:])
    row["report"] = report
    row |= findings_of(report, script)
    saved.write_text(json.dumps(row) + "\n")
    return row


def diagnosed_again(report: dict[str, Any]) -> dict[str, Any]:
    """The report that the rules as they are now make of its evidence."""
    from flatout.app.session import diagnose_all
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.record import from_json
    from flatout.report.json_report import json_report

    evidence = from_json(json.dumps(report["evidence"]), Evidence)
    return json.loads(json_report(evidence, diagnose_all(evidence)))


def timed(
    script: Script,
    options: argparse.Namespace,
    lane: int | None,
    *,
    seconds: float,
    name: str,
    before: list[str] | None = None,
    cure: dict[str, Any] | None = None,
) -> tuple[list[float], int, str]:
    """Run a script with the timer in its process: (seconds of its steps, exit code, the end of what it printed)."""
    from scripts import edit

    work = BUILD / "work" / f"{script.name}-{name}"
    folder = lay_out(script, options.checkouts, work)
    marks = BUILD / "work" / f"{script.name}-{name}.marks"
    for old in marks.parent.glob(f"{marks.name}.*"):
        old.unlink()
    environment = environment_of(script, with_flatout=bool(before))
    environment |= {"WORLD_MARKS": str(marks), "WORLD_TIMER": script.timer, "WORLD_END_S": str(seconds)}
    if cure is not None:
        edit(folder, cure.get("edits", []))
        environment |= cure.get("environment", {})
        if "apply" in cure:
            environment["WORLD_CURE"] = str(HOOKS.parent / "cures" / f"{cure['apply']}.py")
    command = [options.python, *(before or []), *script.command]
    if before:
        module = ["-m"] if script.is_module else []
        command = [
            options.python,
            *before,
            *module,
            script.path,
            *(["--", *script.arguments] if script.arguments else []),
        ]
    if lane is not None:
        command = ["taskset", "-c", str(lane), *command]
    try:
        done = completed(command, folder, environment, timeout_s=LONGEST_S)
        code, printed = done.returncode, done.stdout[-6000:] + done.stderr[-3000:]
    except subprocess.TimeoutExpired as e:
        code, printed = 124, str((e.stdout or b"")[-3000:]) + str((e.stderr or b"")[-2000:])
    return step_times(stamps_of(marks), script.calls_per_step), code, printed


def environment_of(script: Script, *, with_flatout: bool) -> dict[str, str]:
    """What a script runs in: without network, with the hooks of this folder, and with this checkout of flatout if wanted."""
    environment = os.environ | script.environment
    paths = [
        str(HOOKS),
        script.environment.get("PYTHONPATH"),
        str(ROOT / "src") if with_flatout else "",
        os.environ.get("PYTHONPATH"),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "MPLBACKEND": "Agg",
        "PYTHONHASHSEED": "0",
        "WORLD_TORCHVISION": "1",
    }


def findings_of(report: dict[str, Any] | None, script: Script) -> dict[str, Any]:
    """What the report says, beside what the plain timer and the expert measured."""
    if report is None:
        return {"is_reported": False}
    diagnosis, steps = report["diagnosis"], report["evidence"]["steps"]
    whole_s = diagnosis["step_s"] or 0.0
    found = [
        {
            "rule": f["rule"],
            "line": f"{Path(f['file']).name}:{f['line']}",
            "share": f["share"],
            "gain": f["gain"],
            "merged": f["merged"],
        }
        for f in diagnosis["findings"]
    ]
    return {
        "is_reported": bool(steps["num_timed"]),
        "check_step_s": steps["step_s"],
        "kind_of_step": steps["kind"],
        "findings": found,
        "notes": [n["rule"] for n in diagnosis.get("notes", ())],
        "laws_broken": broken_laws(report),
        "left_out": [law["text"] for law in diagnosis.get("broken", ())],
        "unexplained": diagnosis["unexplained_s"] / whole_s if whole_s else None,
        "observing": report["evidence"]["observing"],
        "cures": [compare(cure, report) for cure in script.cures if cure.get("measured", 0) >= WORTH],
    }


def compare(cure: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Whether a cure that the expert measured is named, in a finding or a remark, and how its predicted gain compares."""
    diagnosis = report["diagnosis"]
    wanted, findings = set(cure["rules"]), diagnosis["findings"]
    named = next((f for f in findings if f["rule"] in wanted), None)
    merged = next((f for f in findings if wanted & set(f["merged"])), None)
    predicted = gain_of_step(math.sqrt(named["gain"][0] * named["gain"][1]), report) if named else None
    return {
        "name": cure["name"],
        "measured": cure["measured"],
        "is_named": bool(named or merged or wanted & {n["rule"] for n in diagnosis["notes"]}),
        "predicted": predicted,
        "agrees": None if predicted is None else abs(predicted / cure["measured"] - 1) <= GAIN_WITHIN,
    }


def gain_of_step(gain: float, report: dict[str, Any]) -> float:
    """A predicted gain as `measure.py` would see it.

    A report tells gains of all the loop's time, with what comes between steps (evaluation, plots); a race compares the steps.
    """
    whole_s, step_s = report["diagnosis"]["step_s"], report["evidence"]["steps"]["step_s"]
    if not step_s:
        return gain
    saved_s = whole_s * (1 - 1 / gain)
    return step_s / (step_s - saved_s) if saved_s < step_s else math.inf


def steps_right(row: dict[str, Any]) -> bool | None:
    """Whether the step is the timer's in the same process, over the whole run or over the steps that `check` timed, or the plain
    run's.

    The runs hold different steps where these come sorted by length, where a machine's speed changes, and on a GPU, whose launches
    are slower once the profiler has run: `check` times the steps before it.
    """
    ours, timers = (
        row.get("check_step_s"),
        [row.get(f"{name}_s") for name in ("timer_step", "timer_same_steps", "plain_step")],
    )
    return any(abs(ours / t - 1) <= STEPS_WITHIN for t in timers if t) if ours and timers[0] else None


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:30} {row['error'][:150]}"
    ms = lambda s: f"{1e3 * s:9.2f}" if s else "        -"  # noqa: E731
    right = {True: "right", False: "WRONG", None: "  -  "}[steps_right(row)]
    first = "; ".join(
        f"{f['rule']} {f['line']} {f['gain'][0]:.2f}-{f['gain'][1]:.2f}" for f in row.get("findings", [])[:3]
    )
    share = row.get("unexplained")
    return (
        f"{row['name']:30} exit {row['exit']:3} {row['seconds']:4.0f} s  plain {ms(row.get('plain_step_s'))} "
        f"timer {ms(row['timer_step_s'])} "
        f"check {ms(row.get('check_step_s'))} ms {right}  unexplained {'-' if share is None else f'{share:4.0%}'}  "
        f"laws {len(row.get('laws_broken', ()))}  {first}"
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [r for r in rows if r.get("is_reported")]
    cures = [c for r in ran for c in r["cures"]]
    priced = [c for c in cures if c["agrees"] is not None]
    right = [r for r in ran if steps_right(r) is not None]
    count = lambda values: sum(1 for v in values if v)  # noqa: E731
    return {
        "scripts": len(rows),
        "repositories": len({r["repository"] for r in rows if "repository" in r}),
        "reported": len(ran),
        "steps right": f"{count(steps_right(r) for r in right)} of {len(right)}",
        "scripts with a law broken": count(r["laws_broken"] for r in ran),
        "scripts with claims left out": count(r["left_out"] for r in ran),
        "unexplained at most 30 %": f"{count((r['unexplained'] or 0) <= 0.3 for r in ran)} of {len(ran)}",
        "cures of 1.15x and more": len(cures),
        "of these named": f"{count(c['is_named'] for c in cures)} of {len(cures)}",
        "predicted within 25 %": f"{count(c['agrees'] for c in priced)} of {len(priced)}",
    }


if __name__ == "__main__":
    sys.exit(main())
