"""What do the peers say of the same scripts? TraceML, and torch.profiler with HolisticTraceAnalysis, on the slow examples.

    python bench/peers.py --out bench/results/... [--only NAME ...] [--controls] [--venv .peers] [--limit 180]

The peers live in a virtual environment of their own, made on the first call. Each script runs once under each peer, which gets
what its own documentation asks for:

- traceml: `traceml run SCRIPT`, with the edit that its quickstart asks of a plain loop made for it:
  `traceml_ai.init(mode="auto")`, and `with traceml_ai.trace_step(model):` around the body of the innermost loop in which the
  optimizer steps. A script without such a loop runs unedited. Its words are the primary diagnosis of its summary and that of
  its section on step time.
- profiler: torch.profiler with stacks over eight steps (optimizer hooks mark them, so no edit is needed). Its words are
  the row of its table with the most self time; its line is the first line of the script in that row's name or stack. Then
  HolisticTraceAnalysis reads the trace (temporal breakdown); its words are appended, its errors too.

How a row is judged, against examples/manifest.toml, the benefit of the doubt going to the peer:

- `cause`: its words match a pattern of the example's rule (or of a rule that the manifest accepts besides) in CAUSES below: the
  mechanism, however named. The name of an operator counts where it can only mean that mechanism. A statement that says that
  nothing was found or known (NOTHING) counts for nothing.
- `phase`: weaker: its words name the phase or resource that the cause lies in (PHASES below).
- `line`: the line it names is one of those that the manifest lists for the example, in the same file; `function`: weaker: it lies
  in the same function as one of them.
- `gain`: a speed-up that its words promise ('1.8x'), within 25 % of the twin's measured one; None where none is promised.
- on a control (`--controls`) `advice` is what it says to change; none is right.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINNED = ["torch==2.13.0", "numpy==2.4.6", "scikit-learn==1.9.1"]
PEERS = ["traceml-ai==0.5.0", "HolisticTraceAnalysis==0.5.0"]
WITHIN = 0.25

_INPUT = r"input.?bound|input (wait|pipeline|load)|data ?load|fetch|getitem|collate"
CAUSES = {
    "bandwidth.dense-embedding-gradient": r"sparse|embedding|dense.?grad",
    "bandwidth.growing-cat": r"\bcat\b|concat|grow",
    "bandwidth.materialised-attention": r"attention|sdpa|softmax|\bbmm\b",
    "bandwidth.memory-format": r"channels.?last|nchw|nhwc|memory.?format|layout",
    "bandwidth.unfused-chain": r"fus|element-?wise|point-?wise",
    "capacity.fresh-pages": r"page.?fault|malloc|allocat",
    "compute.accidental-float64": r"float64|double|dtype|precision",
    "compute.double-forward": r"twice|duplicat|repeat|redundant",
    "compute.padding": r"padd",
    "compute.unused-gradient": r"frozen|unused|requires_grad|unneeded grad",
    "compute.unused-output": r"unused|dead code|not used",
    "input.collate-in-ram": _INPUT,
    "input.hand-made-batch": rf"{_INPUT}|python",
    "input.slow-loader": _INPUT,
    "input.workers-restarted": rf"{_INPUT}|worker",
    "overhead.host-read": r"\bsync|\.item|_local_scalar_dense|host read",
    "overhead.layers-one-by-one": r"launch.?bound|tiny|small (op|kernel)|overhead|merge|batch",
    "overhead.metrics-one-by-one": r"python|residual|\.item|_local_scalar_dense|\bsync|tiny|small",
    "overhead.nan-check": r"isnan|isfinite|\bnan\b|\bsync|\.item",
    "overhead.per-parameter-optimizer": r"fused optimizer|foreach|optimizer.?(bound|heavy)",
    "overhead.python-line": r"python|residual|host.?(bound|overhead)|cpu.?(bound|stall)",
    "overhead.python-loop": r"python|residual|launch.?bound|tiny|small (op|kernel)|host.?(bound|overhead)|\bselect\b",
    "overhead.recomputed-constant": r"recomput|constant|cache|hoist",
    "overhead.tensor-from-python": r"python|residual|torch\.tensor",
    "overhead.tiny-operators": r"launch.?bound|tiny|small (op|kernel|batch)|batch size|overhead",
    "run.debug-mode": r"anomaly|debug|determinis",
    "run.evaluation-graph": r"no_grad|inference_mode|evaluation|validation",
    "run.state-copied-every-step": r"copy|copie|clone|state_dict",
}
"""What a peer's words must contain (any case) to have named the cause."""
PHASES = {
    "input": r"input|data|fetch|load",
    "compute": r"comput|forward|backward|matmul|\b(add)?mm\b|conv",
    "bandwidth": r"memory|bandwidth|forward|backward|comput",
    "overhead": r"residual|overhead|host|cpu|launch|optimizer",
    "run": r"forward|backward|comput|residual",
}
"""The same for the phase, by the shelf of the rule."""
NOTHING = re.compile(r"insufficient|no data|balanced|normal|no clear|healthy|not enough", re.IGNORECASE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--peers", nargs="*", choices=sorted(RUNNERS), default=sorted(RUNNERS))
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--venv", type=Path, default=ROOT / ".peers")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one script under one peer")
    parser.add_argument("--again", nargs="*", type=Path, default=[], help="judge what was said in these runs, too")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    manifest = tomllib.loads((ROOT / "examples" / "manifest.toml").read_text())
    said_before = [json.loads(path.read_text()) for path in options.again]
    python = environment(options.venv)
    chosen = [e for e in manifest["example"] if not options.only or e["name"] in options.only]
    rows = [judge(e, run(peer, python, e["slow"], options.limit)) for e in chosen for peer in options.peers]
    controls = [c for run_before in said_before for c in run_before["controls"]]
    known = {e["name"]: e for e in manifest["example"]}
    for row in (r for run_before in said_before for r in run_before["examples"]):
        words = {k: row[k] for k in ("peer", "words", "file", "line", "is_advice", "seconds") if k in row}
        words["file"] = str(ROOT / row["file"]) if row["file"] is not None else None
        rows.append(judge(known[row["name"]], words))
    if options.controls:
        for control in manifest["control"]:
            for peer in options.peers:
                said = run(peer, python, control["path"], options.limit)
                controls.append({"name": control["name"], **said, "advice": said["is_advice"]})
                print(f"{control['name']:22} {peer:9} {said['words'][:90]}", flush=True)
    summary = summarise(rows, controls)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"versions": versions(python), "summary": summary, "examples": rows, "controls": controls}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    whole = len(manifest["example"]) + (len(manifest["control"]) if options.controls else 0)
    seconds = sum(r["seconds"] for r in rows) / max(1, len(chosen)) * whole
    print(f"\na whole run over {whole} scripts takes about {seconds / 60:.0f} min on this machine")
    return 0


# ---------------------------------------------------------------------------------------------------------- environment


def environment(folder: Path) -> str:
    """The python of the peers' environment, which is made when it is not there. torch is pinned in every call of pip."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not {"torch", "traceml-ai", "HolisticTraceAnalysis"} <= versions(str(python)).keys():
        print(f"installing {', '.join(PINNED + PEERS)} into {folder}", flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINNED], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINNED, *PEERS], check=True)
    return str(python)


def versions(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform, os\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "names = ['torch', 'traceml-ai', 'HolisticTraceAnalysis', 'numpy', 'pandas', 'scikit-learn']\n"
        "known = {n: found[n] for n in names if n in found}\n"
        "print(json.dumps({**known, 'python': platform.python_version(), 'cores': str(os.cpu_count())}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------------------------------------------------------- peers


def run(peer: str, python: str, script: str, limit_s: float) -> dict[str, Any]:
    """What one peer says of one script: words, file and line (if any), whether that is advice, and the seconds it took."""
    began = perf_counter()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            said = RUNNERS[peer](python, ROOT / "examples" / script, Path(folder), limit_s)
        except subprocess.TimeoutExpired:
            said = {"words": f"no answer within {limit_s:.0f} s", "is_advice": False}
    return {"peer": peer, "file": None, "line": None, **said, "seconds": round(perf_counter() - began, 1)}


def run_traceml(python: str, script: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    edited, is_edited = with_trace_step(script.read_text())
    for beside in script.parent.glob("*.py"):
        (folder / beside.name).write_text(beside.read_text())
    (folder / script.name).write_text(edited)
    command = [str(Path(python).with_name("traceml")), "run", "--run-name", "run", "--logs-dir", "logs"]
    called(python, [*command, script.name], folder, limit_s)
    path = folder / "logs" / "run" / "final_summary.json"
    if not path.exists():
        return {"words": "no summary was written", "is_advice": False, "edited": is_edited}
    summary = json.loads(path.read_text())
    found = [summary.get("primary_diagnosis") or {}, (summary.get("step_time") or {}).get("diagnosis") or {}]
    said = [". ".join(str(d[k]).rstrip(".") for k in ("status", "summary", "action") if d.get(k)) for d in found]
    is_advice = any(d.get("severity") not in (None, "info") for d in found if not NOTHING.search(str(d.get("status"))))
    return {"words": " | ".join(dict.fromkeys(filter(None, said))), "is_advice": is_advice, "edited": is_edited}


def with_trace_step(text: str) -> tuple[str, bool]:
    """The script with the edit of TraceML's quickstart, and whether it could be made."""
    tree = ast.parse(text)
    loop = step_loop(tree)
    model = trained_model(tree)
    if loop is None or model is None:
        return text, False
    step = ast.parse(f"with traceml_ai.trace_step({model}):\n    pass").body[0]
    assert isinstance(step, ast.With)
    step.body = loop.body
    loop.body = [step]
    start = ast.parse('import traceml_ai\ntraceml_ai.init(mode="auto")').body
    after = next(
        (i + 1 for i, node in reversed(list(enumerate(tree.body))) if isinstance(node, (ast.Import, ast.ImportFrom))), 0
    )
    tree.body[after:after] = start
    return ast.unparse(ast.fix_missing_locations(tree)), True


def step_loop(tree: ast.AST) -> ast.For | ast.While | None:
    """The innermost loop around a call of some optimizer's `step`."""
    found: ast.For | ast.While | None = None
    for node in ast.walk(tree):  # outer loops come before inner ones
        if isinstance(node, (ast.For, ast.While)) and any(is_optimizer_step(n) for n in ast.walk(node)):
            found = node
    return found


def is_optimizer_step(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and "opt" in ast.unparse(node.func.value)
    )


def trained_model(tree: ast.AST) -> str | None:
    """The expression whose `.parameters()` are given to something that is called like an optimizer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "optim" in ast.unparse(node.func):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and inner.attr == "parameters":
                    return ast.unparse(inner.value)
    return None


def run_profiler(python: str, script: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    out = folder / "profiled.json"
    called(python, [python, str(Path(__file__)), "inside-profiler", str(script), str(out)], folder, limit_s)
    said: dict[str, Any] = {"words": "the profiler recorded no step", "is_advice": False}
    if out.exists():
        said = json.loads(out.read_text())
    done = called(python, [python, str(Path(__file__)), "inside-hta", str(folder / "traces")], folder, limit_s)
    last = done.stdout.strip().splitlines()[-1:] or ["no answer"]
    said["words"] += f" | HTA: {last[0]}"
    return said


def called(python: str, command: list[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """The command's outcome; whatever it started is gone afterwards, or the next run would find its port taken."""
    environ = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **words)
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


RUNNERS = {"traceml": run_traceml, "profiler": run_profiler}


# --------------------------------------------------------------------------------- what runs in the peers' environment


def inside_profiler(script: str, out: str) -> None:
    """Run `script` with torch.profiler over eight of its steps; write the table's first row, and the trace for HTA."""
    import runpy

    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, profile, schedule

    traces = Path.cwd() / "traces"
    traces.mkdir()

    def ready(profiler: Any) -> None:
        profiler.export_chrome_trace(str(traces / "rank0.json"))
        rows = profiler.key_averages(group_by_stack_n=12)
        total = sum(r.self_cpu_time_total for r in rows) or 1
        top = max((r for r in rows if not r.key.startswith("ProfilerStep")), key=lambda r: r.self_cpu_time_total)
        frames = [re.match(r"(.*\.py)\((\d+)\)", f) for f in (top.key, *top.stack)]
        place = next((f for f in frames if f is not None and Path(f[1]).name == Path(script).name), None)
        words = f"{top.key} has {top.self_cpu_time_total / total:.0%} of the self time"
        file, line = (str(Path(script).resolve()), int(place[2])) if place is not None else (None, None)
        said = {"words": words, "is_advice": False, "file": file, "line": line}
        Path(out).write_text(json.dumps(said))

    plan = schedule(wait=4, warmup=1, active=8, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready, with_stack=True) as profiler:
        seen = {"optimizer": 0, "forward": 0}

        def stepped(*_: object) -> None:
            seen["optimizer"] += 1
            profiler.step()

        def called_forward(module: Any, *_: object) -> None:
            """Without an optimizer a step is a call of the outermost module, that is of the first that was called."""
            root = seen.setdefault("root", id(module))
            if not seen["optimizer"] and id(module) == root:
                seen["forward"] += 1
                if seen["forward"] > 8:
                    profiler.step()

        register_optimizer_step_post_hook(stepped)
        register_module_forward_pre_hook(called_forward)
        sys.argv = [script]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")


def inside_hta(traces: str) -> None:
    """What HolisticTraceAnalysis says of the trace, in one line at the end."""
    try:
        from hta.trace_analysis import TraceAnalysis

        analysis = TraceAnalysis(trace_dir=traces)
        breakdown = analysis.get_temporal_breakdown(visualize=False)
        print(breakdown.to_dict("records")[0])
    except Exception as e:  # noqa: BLE001  # whatever stops the peer is what it said
        print(f"{type(e).__name__}: {str(e).splitlines()[0][:120] if str(e) else ''}")


# -------------------------------------------------------------------------------------------------------------- judging


def judge(example: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    accepted = [example["rule"], *example.get("also", [])]
    words = said["words"]
    told = " | ".join(t for t in words.split(" | ") if not NOTHING.search(t.partition(".")[0]))
    place = ROOT / "examples" / example.get("in", example["slow"])
    lines = [
        n for n, t in enumerate(place.read_text().splitlines(), 1) if any(s in t for s in example["lines_contain"])
    ]
    promise = re.search(r"(\d+(?:\.\d+)?)\s?x\b", words)
    row = {
        "name": example["name"],
        "rule": example["rule"],
        **said,
        "file": os.path.relpath(said["file"], ROOT) if said["file"] is not None else None,
        "cause": any(re.search(CAUSES.get(rule, r"$^"), told, re.IGNORECASE) for rule in accepted),
        "phase": any(re.search(PHASES.get(r.partition(".")[0], r"$^"), told, re.IGNORECASE) for r in accepted),
        "line_exact": said["file"] == str(place) and said["line"] in lines,
        "function": said["file"] == str(place)
        and said["line"] is not None
        and in_same_function(place, said["line"], lines),
        "expected_lines": lines,
        "gain": agrees(example, float(promise[1])) if promise is not None else None,
    }
    yes = {True: "yes", False: "no ", None: "-  "}
    print(
        f"{row['name']:22} {row['rule']:32} {row['peer']:9} cause {yes[row['cause']]} phase {yes[row['phase']]} "
        f"line {yes[row['line_exact']]} function {yes[row['function']]} gain {yes[row['gain']]} "
        f"{row['seconds']:5.1f} s  {words[:90]}",
        flush=True,
    )
    return row


def in_same_function(file: Path, line: int, lines: list[int]) -> bool:
    """Whether the innermost function around `line` holds one of `lines`."""
    functions = [
        n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    around = [n for n in functions if n.lineno <= line <= (n.end_lineno or n.lineno)]
    inner = max(around, key=lambda n: n.lineno, default=None)
    return inner is not None and any(inner.lineno <= n <= (inner.end_lineno or inner.lineno) for n in lines)


def agrees(example: dict[str, Any], promised: float) -> bool:
    """Whether a promised speed-up lies within 25 % of the twin's measured one."""
    sys.path.insert(0, str(Path(__file__).parent))
    from check_examples import step_s

    per = example.get("samples_fast", 1) / example.get("samples_slow", 1)
    measured = step_s(example["slow"]) / step_s(example["fast"]) * per
    return abs(promised / measured - 1) <= WITHIN


def summarise(rows: list[dict[str, Any]], controls: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    print()
    for peer in dict.fromkeys(r["peer"] for r in rows):
        own = [r for r in rows if r["peer"] == peer]
        clean = [c for c in controls if c["peer"] == peer]
        summary[peer] = {
            "num_examples": len(own),
            "cause": sum(r["cause"] for r in own),
            "phase": sum(r["phase"] for r in own),
            "line_exact": sum(r["line_exact"] for r in own),
            "function": sum(r["function"] for r in own),
            "gain": sum(bool(r["gain"]) for r in own),
            "num_controls": len(clean),
            "controls_with_advice": sum(c["advice"] for c in clean),
            "seconds": round(sum(r["seconds"] for r in own), 1),
        }
        print(f"{peer:9} " + "  ".join(f"{key} {value}" for key, value in summary[peer].items()))
    return summary


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside-profiler"]:
        inside_profiler(*sys.argv[2:4])
    elif sys.argv[1:2] == ["inside-hta"]:
        inside_hta(sys.argv[2])
    else:
        sys.exit(main())
