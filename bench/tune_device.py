"""What `flatout tune` makes of five scripts on a GPU, beside the single lines that everybody knows.

    python bench/tune_device.py OUT_FOLDER [--only NAME ...] [--budget 300s] [--small]

For each of examples/gpu: the plan that `flatout tune` writes; then the untouched script, the plan, and each well-known line alone
(as a plan of one lever), all standing in processes of their own and taking stretches of the same steps in turn. Ratios are
medians of paired stretches with 95 % intervals. The lines are raced, not proved: some are not equal. For GPT-2 small also the
crash of `max-autotune-no-cudagraphs` at batch 64: survived, and told.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from flatout.app.plans import environment_of, read_plan
from flatout.core.records.record import to_json
from flatout.machine.measure.stats import median_estimate, ratio_estimate
from flatout.tune.apply import circumstances
from flatout.tune.verify.proof import prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, Request, SideProcess, is_out_of_memory

ROOT = Path(__file__).resolve().parents[1]
FLATOUT = [sys.executable, "-c", "from flatout.app.cli import main; main()"]
LONG = "10000000"
"""Steps of the runs that plans are for: the scripts are cut short, and the table tells the gain of a step."""
MIXED = ("workload.mixed-precision", {"dtype": "bfloat16"})
COMPILE = ("graph.compile", {})
LINES = {
    "bf16 autocast": [MIXED],
    "TF32": [("workload.tf32", {"level": "high"})],
    "torch.compile": [COMPILE],
    "torch.compile reduce-overhead": [("graph.compile", {"mode": "reduce-overhead"})],
    "channels_last": [("memory.channels-last", {})],
    "cuDNN's attention off": [("memory.attention-without-plans", {})],
    "fused optimizer": [("parallelism.fused-optimizer", {})],
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "gpt2_naive": {"lines": {"bf16 autocast + torch.compile": [MIXED, COMPILE]}},
    "resnet_images": {"lines": {n: LINES[n] for n in ("bf16 autocast", "TF32", "torch.compile", "channels_last")}},
    "bert_ragged": {"lines": {n: LINES[n] for n in ("bf16 autocast", "TF32", "torch.compile")}},
    "mlp_small": {
        "lines": {n: LINES[n] for n in ("torch.compile", "torch.compile reduce-overhead", "fused optimizer")}
    },
    "ragged_attention": {"lines": {n: LINES[n] for n in ("torch.compile", "cuDNN's attention off", "fused optimizer")}},
}
NUM_STRETCHES = 15
STRETCH_S = 0.4
_TOGETHER = 0.85
"""The part of a device's memory that all sides may hold at their peaks."""
START_S = 420.0
"""A ResNet-50 whose kernels are tuned one by one makes its first steps after four minutes (H200)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS))
    parser.add_argument("--budget", default="300s")
    parser.add_argument("--plans", type=Path, default=None, help="folder with plans to race instead of tuning")
    parser.add_argument("--crash", action="store_true", help="the crash at batch 64 too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        found = judged(name, options)
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1).replace(f"{ROOT}/", "") + "\n")
        print(
            f"== {name}\n" + json.dumps({k: found[k] for k in ("plan", "ratios", "over_best_line")}, indent=1),
            flush=True,
        )
    if options.crash:
        print(crash(options.out), flush=True)
    return 0


def judged(name: str, options: argparse.Namespace) -> dict[str, Any]:
    script = ROOT / "examples" / "gpu" / f"{name}.py"
    plan, record = options.out / f"{name}.toml", options.out / f"{name}-tuned.json"
    if options.plans is None:
        command = [*FLATOUT, "tune", "--time-budget", options.budget, "--run-steps", LONG]
        command += ["--out", str(plan), "--json", str(record), str(script)]
        said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        (options.out / f"{name}.txt").write_text(neutral(said.stdout + said.stderr[-3000:], options.out))
        for path in (plan, record):
            if path.exists():
                path.write_text(neutral(path.read_text(), options.out))
        print(said.stdout[-3500:], said.stderr[-800:], flush=True)
    else:
        plan = options.plans / f"{name}.toml"
    with tempfile.TemporaryDirectory() as folder:
        sides = {"untouched": Request(target=str(script)), "flatout": planned(script, plan)}
        for line, levers in SCRIPTS[name]["lines"].items():
            path = Path(folder) / f"{len(sides)}.toml"
            path.write_text(toml_of(levers))
            sides[line] = planned(script, path)
        seconds, failed = raced(sides)
    untouched = seconds["untouched"]
    ratios = {side: estimate(untouched, taken) for side, taken in seconds.items() if side != "untouched"}
    lines = {side: ratio for side, ratio in ratios.items() if side != "flatout"}
    best = max(lines, key=lambda side: lines[side][0])
    return {
        "plan": [p.id for p in read_plan(plan).lever],
        "step_s": {side: median_estimate(taken).value for side, taken in seconds.items()},
        "ratios": ratios,
        "best_line": best,
        "over_best_line": estimate(seconds[best], seconds["flatout"]) if "flatout" in seconds else None,
        "failed": failed,
        "device": circumstances().device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def neutral(text: str, out: Path) -> str:
    """Without the paths of this machine."""
    return text.replace(f"{ROOT}/", "").replace(f"{out}/", "")


def planned(script: Path, plan: Path) -> Request:
    return Request(target=str(script), plan=str(plan), environment=environment_of(read_plan(plan)))


def toml_of(levers: list[tuple[str, dict[str, Any]]]) -> str:
    parts = []
    for id, parameters in levers:
        rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in parameters.items())
        parts.append(f'[[lever]]\nid = "{id}"\nguarantee = "bounded"\n[lever.parameters]\n{rows}')
    return "\n".join(parts)


class Race:
    """Sides that stand in processes of their own and take stretches of whole cycles of steps in turn. Use it in a `with`."""

    def __init__(
        self, sides: dict[str, Request], *, cycle: int = 1, start_s: float = START_S, one_by_one: bool = False
    ) -> None:
        """Sides start at once; or `one_by_one`, so that the seconds to their first steps can be compared."""
        self.failed: dict[str, str] = {}
        """Why sides failed."""
        self.stood_after_s: dict[str, float] = {}
        """Seconds from the start of the race, or of the side where they start one by one, until it stood."""
        self._one_by_one = one_by_one
        self.peak_bytes: dict[str, int] = {}
        """What sides held of the device at most, in the last stretch that they took."""
        self._sides, self._cycle, self._start_s = sides, cycle, start_s
        self._stack = ExitStack()
        self._standing: dict[str, SideProcess] = {}
        self._is_lean = False
        """Whether sides do not all fit on the device with what they cache: that is given back when they stand."""

    def __enter__(self) -> Race:
        first: list[SideAnswer] = []
        for side in () if self._one_by_one else self._sides:
            self._start(side)
        began = time.monotonic()
        for side in self._sides:
            if self._one_by_one:
                began = time.monotonic()
                self._start(side)
            first += self._first_answer(side)
            self.stood_after_s[side] = time.monotonic() - began
        lost = [side for side, why in self.failed.items() if is_out_of_memory(why)]
        for side in lost:  # once more, beside sides that stand
            del self.failed[side]
            self._start(side)
            first += self._first_answer(side)
        peaks = sum(one.device_peak_bytes for one in first)
        total = max((one.device_total_bytes for one in first), default=0)
        self._is_lean = peaks > _TOGETHER * total > 0
        return self

    def _start(self, side: str) -> None:
        import msgspec

        wanted = msgspec.structs.replace(self._sides[side], num_recorded=8, seed=0)
        self._standing[side] = self._stack.enter_context(SideProcess(wanted))

    def _first_answer(self, side: str) -> list[SideAnswer]:
        """What a side answers once it stands; nothing, and it is dropped, where it does not come so far."""
        try:
            answer = self._standing[side].answer(timeout_s=self._start_s)
            if answer.what == "ended":
                raise Failed(answer.error or "it ended")
        except Failed as e:
            self._drop(side, str(e))
            return []
        return [answer]

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def seconds(self, only: Collection[str] | None = None) -> dict[str, list[float]]:
        """Seconds a step of each side, stretch by stretch; `only` are sides that go on, all others end before that."""
        for side in [s for s in self._standing if only is not None and s not in only]:
            self._standing.pop(side).end()
        seconds: dict[str, list[float]] = {side: [] for side in self._standing}
        sizes = dict.fromkeys(self._standing, max(5, self._cycle))
        for number in range(NUM_STRETCHES + 3):
            for side in list(self._standing):
                try:
                    self._standing[side].order(sizes[side], is_lean=self._is_lean)
                    answer = self._standing[side].answer(timeout_s=240.0)
                    taken, self.peak_bytes[side] = answer.seconds / sizes[side], answer.device_peak_bytes
                    if not answer.is_finite:
                        raise Failed(f"its weights are no finite numbers any more after {answer.num_steps} steps")
                except Failed as e:
                    self._drop(side, str(e))
                    continue
                if number >= 3:
                    seconds[side].append(taken)
                sizes[side] = self._cycle * max(1, min(500, round(STRETCH_S / taken / self._cycle)))
        return {side: seconds[side] for side in self._standing}

    def _drop(self, side: str, why: str) -> None:
        self.failed[side] = why
        self._standing.pop(side).end()


def raced(sides: dict[str, Request], *, cycle: int = 1) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds a step of each side, stretch by stretch of whole cycles of steps in turn, and why some sides failed."""
    with Race(sides, cycle=cycle) as race:
        return race.seconds(), race.failed


def estimate(before: list[float], after: list[float]) -> list[float]:
    num = min(len(before), len(after))
    ratio = ratio_estimate(before[:num], after[:num])
    return [round(ratio.value, 3), round(ratio.low, 3), round(ratio.high, 3)]


def crash(out: Path) -> str:
    """`max-autotune-no-cudagraphs` at batch 64 against the same plan in the default mode: what a Verdict says of it."""
    import msgspec

    script = ROOT / "examples" / "gpu" / "gpt2_naive.py"
    place = {
        "file": "gpt2_naive.py",
        "function": "CausalSelfAttention.forward",
        "code": "att = F.softmax(att, dim=-1)",
    }
    sides = []
    for name, mode in (("default", "default"), ("crash", "max-autotune-no-cudagraphs")):
        plan = out / f"batch64-{name}.toml"
        plan.write_text(toml_of([MIXED, ("memory.fused-attention", place), ("graph.compile", {"mode": mode})]))
        sides.append(msgspec.structs.replace(planned(script, plan), arguments=("--batch", "64")))
    terms = ProofTerms(num_steps=3, budget_s=3.0, timeout_s=280.0, is_compared=False, num_processes=1)
    found = prove_script(sides[0], sides[1], terms)
    (out / "crash.json").write_bytes(to_json(found))
    return f"batch 64, max-autotune-no-cudagraphs: {found.outcome}: {found.because[:800]}"


if __name__ == "__main__":
    sys.exit(main())
