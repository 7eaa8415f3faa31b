"""Plain scripts of examples/gpu with the plan of `flatout tune`, against the best public ways to train the same, side by side.

    python bench/best_device.py OUT_FOLDER [--only ROW ...] [--plans FOLDER] [--budget 300s] [--losses] [--small]

Of each row: `flatout tune` of the plain script (or a plan that is there already); then the plan and all of the peer's settings
stand in processes of their own and take stretches of steps in turn; then the plan and the fastest of these settings alone, in new
processes, so that the peer is not the luckiest of several. Ratios are medians of paired stretches with 95 % intervals, of samples
a second. `--losses` runs 500 steps of both and of the untouched script, on three seeds each, and compares the last losses.
`--small` tries it all on a CPU, where the examples are toys; its figures mean nothing.

Peers are in bench/best; nanoGPT's model comes from a checkout that the variable NANOGPT names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tune_device import FLATOUT, LONG, ROOT, estimate, neutral, raced, toml_of

from flatout.app.plans import environment_of, read_plan
from flatout.machine.measure.stats import median_estimate
from flatout.tune.apply import circumstances
from flatout.tune.verify.side_process import Failed, Request, SideProcess

GPU, BEST = ROOT / "examples" / "gpu", ROOT / "bench" / "best"
LOSS_STEPS = 500
SEEDS = (11, 12, 13)


class Row(NamedTuple):
    """A workload: the plain script, what a step of it is in `unit`, and the peer's script with its settings.

    `samples` are of one step of the plain script; a setting has its own where it takes another batch.
    """

    title: str
    goal: float
    script: Path
    arguments: tuple[str, ...]
    unit: str
    samples: int
    peer: Path
    settings: dict[str, tuple[tuple[str, ...], int]]
    needs: str = ""


def _llama(documents: bool) -> dict[str, tuple[tuple[str, ...], int]]:
    own: tuple[str, ...] = ("--documents",) if documents else ()
    kernels = ("flex", "varlen") if documents else ("sdpa", "cudnn")
    found = {}
    for kernel in kernels:
        for loss in ("plain", "liger"):
            found[f"{kernel}, {loss} loss"] = ((*own, "--attention", kernel, "--loss", loss), 4 * 4096)
    return found


def _gpt2() -> dict[str, tuple[tuple[str, ...], int]]:
    batches = {"batch 16": ("--batch", "16"), "batch 32": ("--batch", "32"), "batch 64": ("--batch", "64")}
    found = {name: (options, int(options[1]) * 1024) for name, options in batches.items()}
    found["12 x 4 accumulated"] = (("--batch", "12", "--accumulate", "4"), 48 * 1024)
    return found


ROWS = {
    "gpt2": Row(
        "GPT-2 124M, 1024 tokens",
        1.12,
        GPU / "gpt2_naive.py",
        ("--batch", "16"),
        "tokens",
        16 * 1024,
        BEST / "gpt2.py",
        _gpt2(),
        needs="NANOGPT",
    ),
    "llama": Row(
        "Llama-like 1B, 4096 tokens",
        1.10,
        GPU / "llama_naive.py",
        (),
        "tokens",
        4 * 4096,
        BEST / "llama.py",
        _llama(documents=False),
    ),
    "llama-documents": Row(
        "the same, documents packed",
        1.25,
        GPU / "llama_naive.py",
        ("--documents",),
        "tokens",
        4 * 4096,
        BEST / "llama.py",
        _llama(documents=True),
    ),
    "resnet50": Row(
        "ResNet-50, 224 pixels",
        1.10,
        GPU / "resnet_images.py",
        ("--bottleneck", "--batch", "256"),
        "images",
        256,
        BEST / "resnet.py",
        {
            mode: (("--bottleneck", "--batch", "256", "--compile", mode), 256)
            for mode in ("default", "reduce-overhead", "max-autotune")
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=tuple(ROWS))
    parser.add_argument("--budget", default="300s")
    parser.add_argument("--plans", type=Path, help="a folder with plans to race instead of tuning")
    parser.add_argument(
        "--levers", type=Path, help="a JSON file of levers by row, [[id, parameters], ...], to race instead"
    )
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        row = ROWS[name]
        if row.needs and row.needs not in os.environ:
            print(f"{name}: left out, {row.needs} names no checkout", flush=True)
            continue
        found = judged(name, small(row) if options.small else row, options)
        (options.out / f"best_{name}.json").write_text(json.dumps(found, indent=1).replace(f"{ROOT}/", "") + "\n")
        print(json.dumps({k: v for k, v in found.items() if k != "losses"}, indent=1), flush=True)
    return 0


def small(row: Row) -> Row:
    """The row with the toy sizes that the scripts have on a CPU."""

    def without_sizes(arguments: tuple[str, ...]) -> tuple[str, ...]:
        at = arguments.index("--batch") if "--batch" in arguments else None
        return arguments if at is None else arguments[:at] + arguments[at + 2 :]

    settings = {name: (without_sizes(arguments), 1) for name, (arguments, _) in row.settings.items()}
    return row._replace(arguments=without_sizes(row.arguments), samples=1, settings=settings)


def judged(name: str, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """The plan, its race against the peer's settings, then against the best of them alone."""
    plan = plan_of(name, row, options)
    own = Request(
        target=str(row.script), arguments=row.arguments, plan=str(plan), environment=environment_of(read_plan(plan))
    )
    peers = {
        setting: Request(target=str(row.peer), arguments=arguments) for setting, (arguments, _) in row.settings.items()
    }
    samples = {setting: number for setting, (_, number) in row.settings.items()} | {"flatout": row.samples}
    first, failed = raced({"flatout": own} | peers)
    rates = {side: samples[side] / median_estimate(taken).value for side, taken in first.items()}
    found: dict[str, Any] = {
        "title": row.title,
        "goal": row.goal,
        "plan": [p.id for p in read_plan(plan).lever],
        "unit": row.unit,
        "a_second_of_all": rates,
        "failed": failed,
        "device": circumstances().device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    settings = [setting for setting in row.settings if setting in first]
    if "flatout" not in first or not settings:
        return found
    best = max(settings, key=lambda setting: rates[setting])
    second, failed = raced({"flatout": own, best: peers[best]})
    found |= {"peer": best, "failed_again": failed}
    if len(second) == 2:
        a_sample = {side: [s / samples[side] for s in taken] for side, taken in second.items()}
        found["a_second"] = {side: 1 / median_estimate(taken).value for side, taken in a_sample.items()}
        found["over_peer"] = estimate(a_sample[best], a_sample["flatout"])
    if options.losses:
        plain = Request(target=str(row.script), arguments=row.arguments)
        found["losses"] = {
            side: [last_loss(request, seed) for seed in SEEDS]
            for side, request in {"untouched": plain, "flatout": own, best: peers[best]}.items()
        }
    return found


def plan_of(name: str, row: Row, options: argparse.Namespace) -> Path:
    """The plan that tune writes, or the one that is to be raced."""
    plan: Path = options.out / f"best_{name}.toml"
    if options.levers is not None:
        plan.write_text(toml_of(json.loads(options.levers.read_text())[name]))
        return plan
    if options.plans is not None:
        return Path(options.plans) / f"best_{name}.toml"
    command = [*FLATOUT, "tune", "--time-budget", options.budget, "--run-steps", LONG, "--out", str(plan)]
    ended = subprocess.run(
        [*command, str(row.script), "--", *row.arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    (options.out / f"best_{name}.txt").write_text(neutral(ended.stdout + ended.stderr[-3000:], options.out))
    if not plan.exists():
        raise SystemExit(f"{name}: tune wrote no plan: {ended.stderr[-800:]}")
    plan.write_text(neutral(plan.read_text(), options.out))
    return plan


def last_loss(request: Request, seed: int) -> float | None:
    """The mean of the last losses of LOSS_STEPS steps on a seed; None where the run failed."""
    import msgspec

    wanted = msgspec.structs.replace(request, is_whole=True, num_losses=LOSS_STEPS, seed=seed)
    with tempfile.TemporaryDirectory() as folder, SideProcess(msgspec.structs.replace(wanted, folder=folder)) as side:
        try:
            answer = side.answer(timeout_s=900.0)
        except Failed as e:
            print(f"a run of 500 steps failed: {str(e)[:300]}", flush=True)
            return None
    return answer.mean_loss


if __name__ == "__main__":
    sys.exit(main())
