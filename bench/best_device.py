"""Plain scripts of examples/gpu with the plan of `flatout tune`, against the best public ways to train the same, side by side.

    python bench/best_device.py OUT_FOLDER [--only ROW ...] [--budget 300s] [--losses | --only-losses] [--accounts both]

Of each row: `flatout tune` of the plain script (or a plan that is there already); then the plan and all of the peer's settings
stand in processes of their own and take stretches of steps in turn; where these are several, the plan and the fastest of them
take new stretches then, so that the peer is not the luckiest of several. Ratios are medians of paired stretches with 95 %
intervals, of samples a second. `--plans` names a folder with plans to race instead; `--levers` has levers that were chosen by
hand raced, whose results are `by_hand_ROW.json`. `--settings-of` names a folder with results: of each peer the setting that was
fastest there races alone.

`--losses` runs 500 steps of both, and of the untouched script where that does not take many times as long, on `--seeds` each,
and compares the last losses, with `--loss-batch` rows a step where that is not the script's own number; `--only-losses` does
nothing else.
`--accounts both` says where a step of the plan and of the fastest peer goes, kernel by kernel (bench/best/account.py); `plan`
and `peer` name one of them.
`--gpus` races as many rows side by side, each on a GPU of its own. `--small` tries it all on a CPU, where the examples are toys;
its figures mean nothing.

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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from over_gpus import Job, run_over_gpus
from tune_device import FLATOUT, LONG, ROOT, START_S, Race, estimate, neutral, toml_of

from flatout.app.plans import environment_of, read_plan
from flatout.machine.measure.stats import median_estimate
from flatout.tune.apply import circumstances
from flatout.tune.verify.side_process import Failed, Request, SideProcess

GPU, BEST = ROOT / "examples" / "gpu", ROOT / "bench" / "best"
LOSS_STEPS = 500
FIRST_SEED = 11
ACCOUNT_S = 240.0


class Peer(NamedTuple):
    """A public way to train the same: its script, its settings, and how many samples a step has with each."""

    script: Path
    settings: dict[str, tuple[tuple[str, ...], float]]
    goal: float


class Row(NamedTuple):
    """A workload: the plain script, how many samples in `unit` a step of it has, and its peers by name.

    `tuned` are the arguments with which `flatout tune` runs it, where they are others: an untouched script may not fit with the
    batch that is raced. `cycle` optimizer steps belong together, as those of an iteration of PPO do: stretches are whole cycles.
    `needs` is a variable that names a checkout, or a package. Where `is_plain_slow`, 500 steps of the untouched script take too
    long, or more memory than there is. `budget_s` is for `flatout tune`, `start_s` for a side's first steps. `keys` are
    those that a query sees on average where tokens are packed, for accounts.
    """

    title: str
    script: Path
    arguments: tuple[str, ...]
    unit: str
    samples: float
    peers: dict[str, Peer]
    tuned: tuple[str, ...] | None = None
    allow: str = "bounded"
    cycle: int = 1
    needs: str = ""
    is_plain_slow: bool = False
    budget_s: float = 400.0
    start_s: float = START_S
    keys: float = 0.0


def _llama(settings: tuple[tuple[str, str], ...], *own: str) -> dict[str, tuple[tuple[str, ...], float]]:
    """Attention's kernel and the loss's of each setting: not all pairs, since with the plan only four of them fit in 140 GB."""
    return {
        f"{kernel}, {loss} loss": ((*own, "--attention", kernel, "--loss", loss), 4.0 * 4096)
        for kernel, loss in settings
    }


def _batches(*sizes: int) -> dict[str, tuple[tuple[str, ...], float]]:
    return {f"batch {size}": (("--batch", str(size)), size * 1024.0) for size in sizes}


_ACCUMULATED = {"12 x 4 accumulated": (("--batch", "12", "--accumulate", "4"), 48 * 1024.0)}
_SMALL_BATCH = ("--batch", "1")
"""The untouched Llama takes 2.6 s a step with four rows."""
_RESNET = ("--bottleneck", "--batch", "256")
_PPO = 64 * 32 / (10 * 32)
"""Environment steps for each optimizer step."""
_LONG_PPO = ("--iterations", "100000")
ROWS = {
    "gpt2": Row(
        "GPT-2 124M, 1024 tokens",
        GPU / "gpt2_naive.py",
        ("--batch", "64"),
        "tokens",
        64 * 1024,
        {"nanoGPT": Peer(BEST / "gpt2.py", _batches(16, 32, 64) | _ACCUMULATED, 1.12)},
        tuned=("--batch", "16"),
        needs="NANOGPT",
        is_plain_slow=True,
    ),
    "llama": Row(
        "Llama-like 1B, 4096 tokens",
        GPU / "llama_naive.py",
        (),
        "tokens",
        4 * 4096,
        {
            "torchtitan's recipe, Liger": Peer(
                BEST / "llama.py", _llama((("sdpa", "plain"), ("cudnn", "plain"), ("cudnn", "liger"))), 1.10
            )
        },
        tuned=_SMALL_BATCH,
        needs="liger_kernel",
        is_plain_slow=True,
    ),
    "llama-documents": Row(
        "Llama-like 1B, documents packed",
        GPU / "llama_naive.py",
        ("--documents",),
        "tokens",
        4 * 4096,
        {
            "FlexAttention, varlen": Peer(
                BEST / "llama.py",
                _llama((("flex", "plain"), ("varlen", "plain"), ("varlen", "liger")), "--documents"),
                1.25,
            )
        },
        tuned=("--documents", *_SMALL_BATCH),
        needs="liger_kernel",
        is_plain_slow=True,
        keys=1126.0,
    ),
    "llama-float8": Row(
        "Llama-like 1B in float8",
        GPU / "llama_naive.py",
        (),
        "tokens",
        4 * 4096,
        {
            "torchao": Peer(
                BEST / "llama.py",
                {
                    recipe: (("--attention", "cudnn", "--float8", recipe), 4.0 * 4096)
                    for recipe in ("tensorwise", "rowwise")
                },
                1.05,
            )
        },
        tuned=_SMALL_BATCH,
        allow="quality",
        needs="torchao",
        is_plain_slow=True,
        budget_s=600.0,
    ),
    "resnet50": Row(
        "ResNet-50, 224 pixels",
        GPU / "resnet_images.py",
        _RESNET,
        "images",
        256,
        {
            "channels last, compiled": Peer(
                BEST / "resnet.py",
                {mode: ((*_RESNET, "--compile", mode), 256.0) for mode in ("default", "reduce-overhead", "tuned")},
                1.10,
            )
        },
        budget_s=900.0,
    ),
    "bert": Row(
        "BERT-base on ragged text",
        GPU / "bert_ragged.py",
        (),
        "passages",
        32,
        {
            "group_by_length, compiled": Peer(BEST / "bert.py", {"groups": (("--way", "groups"), 32.0)}, 1.5),
            "packed, FlashAttention varlen": Peer(BEST / "bert.py", {"varlen": (("--way", "varlen"), 32.0)}, 1.1),
        },
        keys=164.0,
    ),
    "lora": Row(
        "LoRA on a Llama-like 1B",
        GPU / "lora_naive.py",
        (),
        "tokens",
        4 * 4096,
        {
            "PEFT, Liger": Peer(
                BEST / "lora.py",
                {
                    "compiled": ((), 4.0 * 4096),
                    "Liger": (("--compile", "none", "--liger"), 4.0 * 4096),
                    "Liger, compiled layers": (("--compile", "layers", "--liger"), 4.0 * 4096),
                },
                1.2,
            )
        },
        tuned=("--batch", "2"),
        needs="peft",
        is_plain_slow=True,
        budget_s=600.0,
    ),
    "ppo": Row(
        "PPO, nets of width 64, 64 pendulums",
        GPU / "ppo_naive.py",
        _LONG_PPO,
        "environment steps",
        _PPO,
        {
            "as LeanRL": Peer(
                BEST / "ppo.py",
                {graphs: ((*_LONG_PPO, "--graphs", graphs), _PPO) for graphs in ("own", "inductor", "none")},
                1.2,
            )
        },
        cycle=320,
    ),
    "unet": Row(
        "diffusion U-Net, 128 pixels",
        GPU / "unet_diffusion.py",
        (),
        "images",
        32,
        {
            "channels last, compiled": Peer(
                BEST / "unet.py",
                {
                    name: (options, 32.0)
                    for name, options in {
                        "default": (),
                        "graphs": ("--compile", "graphs"),
                        "flash, graphs": ("--flash", "--compile", "graphs"),
                    }.items()
                },
                1.15,
            )
        },
        needs="denoising_diffusion_pytorch",
        budget_s=600.0,
        start_s=560.0,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=tuple(ROWS))
    parser.add_argument("--budget", help="for `flatout tune`, as 300s, in place of the row's")
    parser.add_argument("--plans", type=Path, help="a folder with plans to race instead of tuning")
    parser.add_argument(
        "--levers",
        type=Path,
        help="a JSON file of levers by row, chosen by hand, [[id, parameters], ...], to race instead",
    )
    parser.add_argument("--settings-of", type=Path, help="a folder with results, whose fastest settings alone race")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--only-losses", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="of each side whose losses are compared")
    parser.add_argument("--loss-batch", type=int, help="rows of a step of all sides whose losses are compared")
    parser.add_argument("--at-once", type=int, default=1, help="seeds of a side whose losses are run side by side")
    parser.add_argument("--accounts", choices=("both", "plan", "peer"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gpus > 1:
        return side_by_side(options)
    for name in options.only:
        row = ROWS[name]
        if row.needs and row.needs not in os.environ and find_spec(row.needs) is None:
            print(f"{name}: left out, it needs {row.needs}", flush=True)
            continue
        row = small(row) if options.small else row
        if options.settings_of is not None:
            row = with_fastest_settings(name, row, options.settings_of)
        plan = plan_of(name, row, options)
        if not options.only_losses:
            found = judged(row, plan, planned_by="hand" if options.levers is not None else "tune")
            stem = "best" if options.levers is None else "by_hand"
            (options.out / f"{stem}_{name}.json").write_text(json.dumps(found, indent=1).replace(f"{ROOT}/", "") + "\n")
            print(json.dumps(found, indent=1), flush=True)
            if options.accounts:
                accounts(options.out, name, row, plan, found, options.accounts)
        if options.losses or options.only_losses:
            fastest = with_fastest_settings(name, row, options.settings_of or options.out)
            out = options.out / f"losses_{name}.json"
            losses = compare_losses(out, fastest, plan, options)
            print(json.dumps(losses, indent=1), flush=True)
    return 0


def with_fastest_settings(name: str, row: Row, folder: Path) -> Row:
    """The row with that setting alone of each peer that was fastest in results of an earlier race."""
    paths = [path for stem in ("best", "by_hand") if (path := folder / f"{stem}_{name}.json").exists()]
    if not paths:
        return row
    peers = dict(row.peers)
    for peer, one in json.loads(paths[0].read_text()).get("over_peers", {}).items():
        label = one["setting"].removeprefix(f"{peer}: ")
        if label in row.peers[peer].settings:
            peers[peer] = row.peers[peer]._replace(settings={label: row.peers[peer].settings[label]})
    return row._replace(peers=peers)


def side_by_side(options: argparse.Namespace) -> int:
    """Rows in processes of their own, the next one on whichever GPU is free; the number of processes that failed."""
    flags = [f"--{n}" for n in ("losses", "only-losses", "small") if getattr(options, n.replace("-", "_"))]
    flags += ["--at-once", str(options.at_once), "--seeds", str(options.seeds)]
    for name in ("budget", "plans", "levers", "settings-of", "accounts", "loss-batch"):
        if (path := getattr(options, name.replace("-", "_"))) is not None:
            flags += [f"--{name}", path]
    jobs = [
        Job(f"best_{name}", [sys.executable, __file__, str(options.out), "--only", name, *map(str, flags)])
        for name in options.only
    ]
    return run_over_gpus(jobs, options.out, options.gpus)


def small(row: Row) -> Row:
    """The row with the toy sizes that the scripts have on a CPU."""

    def without_sizes(arguments: tuple[str, ...]) -> tuple[str, ...]:
        at = arguments.index("--batch") if "--batch" in arguments else None
        return arguments if at is None else arguments[:at] + arguments[at + 2 :]

    peers = {
        name: peer._replace(settings={label: (without_sizes(a), 1.0) for label, (a, _) in peer.settings.items()})
        for name, peer in row.peers.items()
    }
    return row._replace(arguments=without_sizes(row.arguments), tuned=None, samples=1, peers=peers)


def judged(row: Row, plan: Path, *, planned_by: str) -> dict[str, Any]:
    """The plan's race against all settings of the peers, and then against the best of each peer alone, where one has several."""
    own, requests = own_request(row, plan), peer_requests(row)
    settings = {(peer, label): one for peer, p in row.peers.items() for label, one in p.settings.items()}
    samples = {f"{peer}: {label}": number for (peer, label), (_, number) in settings.items()} | {"flatout": row.samples}
    with Race({"flatout": own} | requests, cycle=row.cycle, start_s=row.start_s) as race:
        first = race.seconds()
        rates = {side: samples[side] / median_estimate(taken).value for side, taken in first.items()}
        best = {
            peer: max(sides, key=lambda side: rates[side])
            for peer in row.peers
            if (sides := [side for side in requests if side.startswith(f"{peer}: ") and side in rates])
        }
        is_complete = "flatout" in rates and bool(best)
        is_chosen = is_complete and len(requests) > len(row.peers)
        second = race.seconds({"flatout", *best.values()}) if is_chosen else first
    found: dict[str, Any] = {
        "title": row.title,
        "plan": [p.id for p in read_plan(plan).lever],
        "planned_by": planned_by,
        "unit": row.unit,
        "a_second_of_all": rates,
        "failed": race.failed,
        "peak_gib": {side: round(size / 2**30, 2) for side, size in race.peak_bytes.items()},
        "device": circumstances().device,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if not is_complete:
        return found
    a_sample = {side: [s / samples[side] for s in taken] for side, taken in second.items()}
    found["a_second"] = {side: 1 / median_estimate(taken).value for side, taken in a_sample.items()}
    found["over_peers"] = {
        peer: {"setting": side, "goal": row.peers[peer].goal, "ratio": estimate(a_sample[side], a_sample["flatout"])}
        for peer, side in best.items()
        if side in a_sample and "flatout" in a_sample
    }
    return found


def accounts(out: Path, name: str, row: Row, plan: Path, found: dict[str, Any], which: str) -> None:
    """Where a step of the plan goes, and one of the fastest peer in these results, or `which` of the two."""
    if which != "peer":
        account(out / f"account_{name}_plan.json", own_request(row, plan), row)
    sides = [one["setting"] for one in found.get("over_peers", {}).values()]
    if sides and which != "plan":
        fastest = max(sides, key=lambda side: found["a_second"][side])
        account(out / f"account_{name}_peer.json", peer_requests(row)[fastest], row)


def own_request(row: Row, plan: Path) -> Request:
    """The plain script with a plan."""
    environment = environment_of(read_plan(plan))
    return Request(target=str(row.script), arguments=row.arguments, plan=str(plan), environment=environment)


def peer_requests(row: Row) -> dict[str, Request]:
    """The peers with each of their settings."""
    return {
        f"{peer}: {label}": Request(target=str(one.script), arguments=arguments)
        for peer, one in row.peers.items()
        for label, (arguments, _) in one.settings.items()
    }


def compare_losses(out: Path, row: Row, plan: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The last losses of LOSS_STEPS steps of the plan and of the first setting of each peer, seed by seed, saved side by side."""
    sides = {} if row.is_plain_slow else {"untouched": Request(target=str(row.script), arguments=row.arguments)}
    sides["flatout"] = own_request(row, plan)
    requests = peer_requests(row)
    for peer, one in row.peers.items():
        side = f"{peer}: {next(iter(one.settings))}"
        sides[side] = requests[side]
    batch = () if options.loss_batch is None else ("--batch", str(options.loss_batch))
    losses: dict[str, list[float | None]] = {}
    found = {"steps": LOSS_STEPS, "loss_batch": options.loss_batch, "device": circumstances().device, "losses": losses}
    with ThreadPoolExecutor(options.at_once) as pool:
        for side, request in sides.items():
            seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
            with_batch = msgspec.structs.replace(request, arguments=(*request.arguments, *batch))
            losses[side] = list(pool.map(partial(last_loss, with_batch), seeds))
            out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def account(out: Path, request: Request, row: Row) -> None:
    """Where a step of this side goes, or a stretch of many, by a run of its own."""
    flags = (*(("--stretch",) if row.cycle > 1 else ()), *(("--keys", str(row.keys)) if row.keys else ()))
    flags = (*flags, *(("--plan", request.plan) if request.plan else ()))
    command = [sys.executable, str(BEST / "account.py"), *flags, str(out), request.target, *request.arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=ACCOUNT_S)
    except subprocess.TimeoutExpired:
        print(f"{out.stem}: not done within {ACCOUNT_S:.0f} s", flush=True)
        return
    print(f"{out.stem}: {(ended.stdout if out.exists() else ended.stderr)[-3000:]}", flush=True)


def plan_of(name: str, row: Row, options: argparse.Namespace) -> Path:
    """The plan that tune writes, or the one that is to be raced."""
    plan: Path = options.out / f"best_{name}.toml"
    if options.levers is not None:
        plan.write_text(toml_of(json.loads(options.levers.read_text())[name]))
        return plan
    if options.plans is not None:
        return Path(options.plans) / f"best_{name}.toml"
    command = [
        *FLATOUT,
        "tune",
        "--time-budget",
        options.budget or f"{row.budget_s:.0f}s",
        "--run-steps",
        LONG,
        "--out",
        str(plan),
    ]
    command += ["--allow", row.allow]
    command += [str(row.script), "--", *(row.arguments if row.tuned is None else row.tuned)]
    progress = options.out / f"tune_{name}.log"
    with progress.open("w") as log:  # to be read while it goes on
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, cwd=ROOT)
    said = progress.read_text()
    (options.out / f"best_{name}.txt").write_text(neutral(ended.stdout + said[-3000:], options.out))
    if not plan.exists():
        raise SystemExit(f"{name}: tune wrote no plan: {said[-800:]}")
    plan.write_text(neutral(plan.read_text(), options.out))
    return plan


def last_loss(request: Request, seed: int) -> float | None:
    """The mean of the last losses of LOSS_STEPS steps on a seed; None where the run failed."""
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
