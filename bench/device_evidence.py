"""Is what flatout says of the device true? Its evidence against sums made independently from an exported torch.profiler trace.

    python bench/device_evidence.py OUT_FOLDER [--loops gpt conv ragged overhead sync] [--ranks 2] [--steps 80]

Each loop of bench/device_loops.py is run three times. Observed with the trace kept that flatout saw the device in: busy time,
idle time and copies of the same step must be within 5 %. Alone, then traced by torch.profiler: what the device does in an
undisturbed step (its length alone less the traced busy time is idle). Under `flatout check`: the same figures of another process,
told beside it, since idle time is the host's and differs between processes. The exported trace is read by `flatout report`. With
`--ranks` also the exposed communication of a DistributedDataParallel and an FSDP2 loop under torchrun, of the same step and
imported. Everything goes to OUT_FOLDER/device_evidence.json as it comes, with each report as text. On a CPU it runs through and
compares nothing. The sums here share no code with flatout's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOOPS = str(ROOT / "bench" / "device_loops.py")
FLATOUT = [sys.executable, "-c", "from flatout.app.cli import main; main()"]
PROFILED = 12
SKIPPED = 2
"""The first profiled steps start from an empty queue."""
TOLERANCE = 0.05
TIMEOUT_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--loops", nargs="*", default=["gpt", "conv", "ragged", "overhead", "sync"])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    jobs = [(name, lambda name=name: one_loop(name, args.steps, args.out)) for name in args.loops]
    if "gpt" in args.loops:
        jobs.append(("padded-vocabulary", lambda: padded_vocabulary(args.steps, results, args.out)))
    if args.ranks:
        jobs += [(k, lambda k=k: several_ranks(k, args.ranks, args.steps, args.out)) for k in ("ddp", "fsdp")]
    for name, job in jobs:
        try:
            results[name] = job()
        except Exception as e:  # noqa: BLE001  # a lease is short: one loop that fails must not cost the others
            results[name] = {"failed": f"{type(e).__name__}: {str(e)[-1500:]}"}
        print(name, json.dumps(results[name], indent=1)[:4000], flush=True)
        (args.out / "device_evidence.json").write_text(json.dumps(results, indent=1) + "\n")
    verdicts = {n: r.get("agrees") for n, r in results.items()}
    print(json.dumps(verdicts))
    return 1 if any("failed" in r for r in results.values()) else 0


def one_loop(name: str, steps: int, out: Path) -> dict[str, Any]:
    trace, report = out / f"{name}-trace.json", out / f"{name}-check.json"
    timed = last_json(command([sys.executable, LOOPS, name, "--steps", str(steps), "--trace", str(trace)]))
    check = [*FLATOUT, "check", "--seconds", "6", "--json", str(report), LOOPS, "--", name, "--steps", str(2 * steps)]
    (out / f"{name}-check.txt").write_text(command(check))
    found = json.loads(report.read_text())
    truth = sums(json.loads(trace.read_text()))
    imported = out / f"{name}-imported.json"
    (out / f"{name}-report.txt").write_text(command([*FLATOUT, "report", str(trace), "--json", str(imported)]))
    step = found["evidence"]["device_step"]
    result = {
        "step_s": {"plain": timed["step_s"], "flatout": found["evidence"]["steps"]["step_s"]},
        "truth": truth,
        "device_step": step and {k: v for k, v in step.items() if k not in ("kernels", "gaps", "copies", "waits")},
        "lines_known_fraction": step and line_share(step["kernels"]),
        "seconds_by_phase": step and by_key(step["kernels"], "phase"),
        "gaps": step and step["gaps"][:8],
        "waits": step and step["waits"],
        "copies": step and step["copies"],
        "findings": [{k: f[k] for k in ("rule", "line", "gain", "because")} for f in found["findings"]],
        "findings_of_import": [f["rule"] for f in json.loads(imported.read_text())["findings"]],
        "notes": found["evidence"]["notes"],
        "observing": found["evidence"]["observing"],
    }
    same = same_step(name, steps, out)
    if step is None or truth is None:
        return {**result, "same_step": same, "agrees": None}
    truth["idle_s"] = max(0.0, timed["step_s"] - truth["busy_s"])  # the profiler makes the host slower, the device not
    compared = compare(step, truth, step_s=timed["step_s"], idle_floor=0.01)
    agrees = all(c["agrees"] for c in same["compared"].values())
    return {**result, "same_step": same, "other_process": compared, "agrees": agrees}


def same_step(name: str, steps: int, out: Path) -> dict[str, Any]:
    """The step that flatout profiled, by its evidence and by sums over the same stretch of the very trace."""
    trace, live = out / f"{name}-live-trace.json", out / f"{name}-live.json"
    command([sys.executable, LOOPS, name, "--steps", str(steps), "--live", str(live), "--trace", str(trace)])
    found = json.loads(live.read_text())
    step, window = found["profiled"], found["window_us"]
    truth = sums(json.loads(trace.read_text()), profiled=2, skipped=1, window=window) if trace.exists() else None
    if step is None or truth is None:
        return {"compared": {}}
    return {"truth": truth, "compared": compare(step, truth, step_s=truth["span_s"], idle_floor=0.0)}


def compare(step: dict[str, Any], truth: dict[str, Any], *, step_s: float, idle_floor: float) -> dict[str, Any]:
    """A step of flatout's evidence beside the sums; idle time also agrees within `idle_floor` of a step."""
    copies = step["copies"]
    return {
        "busy": close(step["busy_s"], truth["busy_s"]),
        "idle": close(sum(g["seconds"] for g in step["gaps"]), truth["idle_s"], floor=idle_floor * step_s),
        "copies": close(sum(c["seconds"] for c in copies), truth["copy_s"], floor=0.001 * step_s),
        "copied bytes": close(sum(c["bytes"] for c in copies), truth["copy_bytes"], floor=64),
        "copies beside kernels": close(
            sum(c["overlapped_s"] for c in copies), truth["copy_overlapped_s"], floor=0.002 * step_s
        ),
    }


def padded_vocabulary(steps: int, results: dict[str, Any], out: Path) -> dict[str, Any]:
    """The gain of a padded vocabulary, really made, beside what the rule's trial predicted."""
    times = [
        last_json(command([sys.executable, LOOPS, "gpt", "--steps", str(steps), "--vocab", vocab]))["step_s"]
        for vocab in ("50257", "50304")
    ]
    predicted = [f for f in results.get("gpt", {}).get("findings", []) if f["rule"] == "compute.misaligned-shapes"]
    return {"step_s": times, "measured_gain": times[0] / times[1], "predicted": predicted, "agrees": None}


def several_ranks(kind: str, ranks: int, steps: int, out: Path) -> dict[str, Any]:
    """Exposed communication of rank 0: live, imported, and by independent sums."""
    folder = out / kind
    folder.mkdir(exist_ok=True)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        LOOPS,
        kind,
    ]
    timed = last_json(command([*torchrun, "--steps", str(steps), "--trace", f"{folder}/rank{{rank}}.json"]))
    kept = f"{out}/{kind}-live-trace-{{rank}}.json"
    command([*torchrun, "--steps", str(steps), "--live", f"{out}/{kind}-live-{{rank}}.json", "--trace", kept])
    truth = sums(json.loads((folder / "rank0.json").read_text()))
    whole = sums(json.loads((folder / "rank0.json").read_text()), skipped=0)  # a trace without steps is read as one
    window = json.loads((out / f"{kind}-live-0.json").read_text())["window_us"]
    same = sums(json.loads(Path(kept.format(rank=0)).read_text()), profiled=2, skipped=1, window=window)
    live = json.loads((out / f"{kind}-live-0.json").read_text())
    imported = out / f"{kind}-imported.json"
    (out / f"{kind}-report.txt").write_text(command([*FLATOUT, "report", str(folder), "--json", str(imported)]))
    distributed = json.loads(imported.read_text())["evidence"]["distributed"]
    exposed_s = sum(c["exposed_s"] for c in live["collectives"])
    result = {
        "step_s": timed["step_s"],
        "truth": truth,
        "truth_of_the_same_step": same,
        "live": live["collectives"],
        "imported": distributed,
    }
    if truth is None or whole is None or same is None or not live["collectives"]:
        return {**result, "agrees": None}
    compared = {
        "communication": close(sum(c["seconds"] for c in live["collectives"]), same["communication_s"]),
        "exposed": close(exposed_s, same["exposed_s"], floor=0.001 * same["span_s"]),
        "exposed, imported": close(
            sum(c["exposed_s"] for c in distributed["collectives"]) / PROFILED, whole["exposed_s"]
        ),
    }
    return {**result, "compared": compared, "agrees": all(c["agrees"] for c in compared.values())}


def sums(
    trace: dict[str, Any], *, profiled: int = PROFILED, skipped: int = SKIPPED, window: list[float] | None = None
) -> dict[str, float] | None:
    """Per step, over the profiled steps but the first: by a sweep over all starts and ends. None without device work.

    A step ends with the last of its work; each has an equal share of the launches, in their order. With `window` (microseconds
    of the trace) the times are those between its ends.
    """
    work = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not work:
        return None
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in trace["traceEvents"]
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    launched = sorted(work, key=lambda e: (calls.get(e["args"].get("correlation"), e["ts"]), e["ts"]))
    size = len(launched) / profiled
    before = [e["ts"] + e["dur"] for e in launched[: round(size * skipped)]]
    first = max(before, default=min(e["ts"] for e in work))
    last = max(e["ts"] + e["dur"] for e in launched[: round(size * profiled)])
    first, last = window or (first, last)
    totals = swept(work, first, last)
    num = (profiled - skipped) * 1e6
    inside = [e for e in launched[round(size * skipped) :] if e["cat"] == "gpu_memcpy"]
    return {k: v / num for k, v in totals.items()} | {
        "copy_bytes": sum(e["args"].get("bytes", 0) for e in inside) / (profiled - skipped),
        "launches": size,
        "is_even": float(len(launched) % profiled == 0),
    }


def swept(work: list[dict[str, Any]], first: float, last: float) -> dict[str, float]:
    """Microseconds between `first` and `last` in each state of the device."""
    changes = []
    for e in work:
        start, end = max(e["ts"], first), min(e["ts"] + e["dur"], last)
        if end > start:
            kind = "copy" if e["cat"] == "gpu_memcpy" else "comm" if "nccl" in e["name"].lower() else "kernel"
            changes += [(start, kind, 1), (end, kind, -1)]
    changes.sort()
    running = {"copy": 0, "comm": 0, "kernel": 0}
    totals = dict.fromkeys(
        ("span_s", "busy_s", "idle_s", "copy_s", "copy_overlapped_s", "communication_s", "exposed_s"), 0.0
    )
    totals["span_s"] = last - first
    for (at, kind, change), (until, _, _) in pairwise([(first, "kernel", 0), *changes, (last, "kernel", 0)]):
        running[kind] += change
        length = until - at
        totals["busy_s" if any(running.values()) else "idle_s"] += length
        totals["copy_s"] += length * running["copy"]
        totals["copy_overlapped_s"] += length * running["copy"] * bool(running["kernel"] or running["comm"])
        totals["communication_s"] += length * running["comm"]
        totals["exposed_s"] += length * bool(running["comm"] and not running["kernel"])
    return totals


def close(found: float, truth: float, *, floor: float = 0.0) -> dict[str, Any]:
    """Whether two figures agree, relatively or within an absolute floor."""
    error = abs(found - truth)
    return {"flatout": found, "truth": truth, "agrees": error <= max(TOLERANCE * abs(truth), floor)}


def line_share(kernels: list[dict[str, Any]]) -> float:
    total = sum(k["seconds"] for k in kernels)
    return sum(k["seconds"] for k in kernels if k["source"] >= 0) / total if total else 0.0


def by_key(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row[key]] = seconds.get(row[key], 0.0) + row["seconds"]
    return seconds


def command(words: list[str]) -> str:
    """What a command prints; raises with the end of its complaint when it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} -> {done.returncode}: {done.stderr[-1200:]}")
    return done.stdout


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
