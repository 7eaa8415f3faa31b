"""A training whose ranks are killed (SIGKILL) at random moments: when it goes on, what is lost, and whether it is the same.

    python bench/surviving.py --ranks 4 --kills 50 --device cpu --out FILE [--torchrun 3] [--span 1.0] [--seed 0]

One job under `flatout survive`. In each of its first K lives one rank, drawn at random, kills itself at a moment drawn up to
`--span` seconds after its first step, or, in a quarter of them, after its start, so that some die while the state is brought
back. Recovery is from the kill to the moment at which every rank has done a step again (`loss.item()` returned). Then the same
number of steps without a kill: the losses are compared bit by bit. Beside it, as often as `--torchrun` says, `torchrun
--max-restarts` with the same script, which then resumes from the disk, after one kill. Results are written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

SIZES = {
    "cpu": {"width": 64, "layers": 4, "tokens": 24, "span_s": 1.0},
    # About 100 million parameters: 1.2 GB of state with AdamW in float32.
    "cuda": {"width": 2048, "layers": 24, "tokens": 4096, "span_s": 5.0},
}
EARLY = 0.25
"""The share of kills that come soon after the start, before there is a step as a rule; the others come after a step."""
LIMIT_S = 90
"""Of one trial of torchrun."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--torchrun", type=int, default=0, metavar="TRIALS")
    parser.add_argument("--span", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="where the copies go; twice the state of all ranks"
    )
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="of each job")
    parser.add_argument("--train", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20, help="at least; more if kills are left")
    parser.add_argument("--disk-every", type=int, default=10, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options)
        return 0
    if options.out is None:
        parser.error("--out is needed")
    if options.span is None:
        options.span = SIZES[options.device]["span_s"]
    import torch

    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {os.cpu_count()} cores",
        "ranks": options.ranks,
        "kills": options.kills,
        "span_s": options.span,
        "seed": options.seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        result["survive"] = killed(options, Path(folder) / "killed", Path(folder) / "whole")
        write(options.out, result)
        if options.torchrun:
            result["torchrun"] = []
            for number in range(options.torchrun):
                result["torchrun"].append(by_torchrun(options, Path(folder) / f"torchrun-{number}", number))
                write(options.out, result)
    print(json.dumps(result, indent=1))
    return 0


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


# -- one trial ---------------------------------------------------------------------------------------------------------------


def killed(options: argparse.Namespace, folder: Path, beside: Path) -> dict[str, Any]:
    """The job with kills, and the one without."""
    account = supervised(options, folder, options.steps, options.kills)
    lives = read(folder)
    losses = losses_of(lives)
    last = max(losses, default=0)
    found: dict[str, Any] = {
        "outcome": account["outcome"],
        "why": account["why"],
        "wall_s": account["wall_s"],
        "start_s": account["start_s"],
        "steps": last,
        "starts": account["num_starts"],
        **recovered(folder, lives, options.ranks),
    }
    whole = supervised(options, beside, last, 0)
    expected = losses_of(read(beside))
    found["undisturbed_wall_s"] = whole["wall_s"]
    found["is_bitwise_equal"] = losses == expected and all(len(one) == 1 for one in losses.values())
    return found


def supervised(options: argparse.Namespace, folder: Path, steps: int, kills: int) -> Any:
    folder.mkdir()
    command = [sys.executable, "-m", "flatout.app.cli", "survive", "--nproc", f"{options.ranks}"]
    command += ["--memory-folder", f"{options.memory}"]
    command += ["--json", f"{folder / 'account.json'}", *script(options, folder, steps, kills, disk_every=10)]
    with (folder / "said").open("wb") as said:
        try:
            subprocess.run(command, stdout=said, stderr=said, timeout=options.limit, check=False)
        except subprocess.TimeoutExpired:
            print((folder / "said").read_text()[-6000:], file=sys.stderr)
            raise
    return json.loads((folder / "account.json").read_text())


def by_torchrun(options: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One kill, after some steps, and what torchrun makes of it."""
    folder.mkdir()
    options.seed += 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{options.ranks}"]
    command += [
        "--max-restarts",
        "3",
        *(c for c in script(options, folder, options.steps, 1, disk_every=1) if c != "--"),
    ]
    began = perf_counter()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        for send in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, send)
                process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    back = recovered(folder, read(folder), options.ranks)["recoveries_s"]
    errors = [line for line in (folder / "said").read_text(errors="replace").splitlines() if "Error: " in line]
    found = {"exit_code": code, "wall_s": perf_counter() - began, "recovery_s": back[0] if back else None}
    return {**found, "last_error": errors[-1].strip()[-200:] if errors else ""}


def script(options: argparse.Namespace, folder: Path, steps: int, kills: int, *, disk_every: int) -> list[str]:
    own = ["--train", f"{folder}", "--steps", f"{steps}", "--kills", f"{kills}", "--disk-every", f"{disk_every}"]
    own += ["--device", options.device, "--span", f"{options.span}", "--seed", f"{options.seed}"]
    return [str(Path(__file__).resolve()), "--", *own, "--ranks", f"{options.ranks}"]


Line = tuple[int, int, float, str]
"""Of a log: the life, the step, when it was done, and its loss."""


def read(folder: Path) -> list[list[Line]]:
    """By rank."""
    logs = []
    for path in sorted(folder.glob("log-*")):
        lines = [line.split() for line in path.read_text().splitlines()]
        logs.append([(int(e), int(s), float(t), loss) for e, s, t, loss in lines])
    return logs


def losses_of(logs: list[list[Line]]) -> dict[int, list[str]]:
    """All that any rank ever had for a step."""
    found: dict[int, set[str]] = {}
    for log in logs:
        for _, step, _, loss in log:
            found.setdefault(step, set()).add(loss)
    return {step: sorted(losses) for step, losses in found.items()}


def recovered(folder: Path, logs: list[list[Line]], ranks: int) -> dict[str, Any]:
    """Of each kill: seconds until all ranks had done a step again, and steps done twice."""
    back: list[float] = []
    lost: list[int] = []
    for path in sorted(folder.glob("killed-*"), key=lambda p: int(p.name.rpartition("-")[2])):
        life, at_s = int(path.name.rpartition("-")[2]), float(path.read_text())
        after = sorted({e for log in logs for e, _, _, _ in log if e > life})
        whole = [e for e in after if sum(any(line[0] == e for line in log) for log in logs) == ranks]
        if not whole:
            continue
        firsts = [next(line for line in log if line[0] == whole[0]) for log in logs]
        back.append(max(first[2] for first in firsts) - at_s)
        before = [line[1] for log in logs for line in log if line[0] <= life]
        lost.append(max(before, default=0) - (firsts[0][1] - 1))
    return {
        "kills_done": len(list(folder.glob("killed-*"))),
        "recoveries_s": back,
        "median_s": statistics.median(back) if back else None,
        "longest_s": max(back, default=None),
        "most_steps_lost": max(lost, default=None),
        "steps_lost": lost,
    }


# -- the script that is run --------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    draw = random.Random(options.seed * 1000 + life)
    victim, after_s, is_early = draw.randrange(options.ranks), draw.uniform(0.0, options.span), draw.random() < EARLY
    is_early = is_early and options.disk_every > 1  # torchrun's only kill comes after a step
    is_mine = life < options.kills and rank == victim

    def die() -> None:
        (options.train / f"killed-{life}").write_text(f"{monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)

    def arm() -> None:
        timer = threading.Timer(after_s, die)
        timer.daemon = True
        timer.start()

    if is_mine and is_early:
        arm()
    run(options, life, arm if is_mine and not is_early else lambda: None)


def run(options: argparse.Namespace, life: int, begin: Callable[[], None]) -> None:
    import torch
    from torch import nn

    import flatout
    from flatout.blocks.elastic.survivor import Survivor

    size = SIZES[options.device]
    width = int(size["width"])
    with flatout.World(options.device) as world:
        torch.manual_seed(0)
        layers = [m for _ in range(int(size["layers"])) for m in (nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))]
        model = world.place(nn.Sequential(*layers, nn.Linear(width, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lengths = [1 + (7 * i) % 11 for i in range(40 * int(size["tokens"]) // 6)]
        batches = flatout.Batches(lengths, int(size["tokens"]), rank=world.rank, num_ranks=world.num_ranks, seed=3)
        data = [torch.full((n, width), 1.0 / (1 + i % 7)) for i, n in enumerate(lengths[:64])]
        feed = flatout.Feed(
            [data[i % 64][:1].expand(n, -1) for i, n in enumerate(lengths)], batches, device=world.device
        )
        torch.manual_seed(world.rank)
        log = (options.train / f"log-{world.rank}").open("a", buffering=1)
        with Survivor(options.train / "disk", disk_every=options.disk_every) as state:
            done = state.resume(model=model, optimizer=optimizer, feed=feed)
            first = done + 1
            until = max(options.steps, done + 5 if options.kills else 0)
            while done < until or life < options.kills:
                for batch in feed:
                    loss = model(batch.values).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    done += 1
                    if done == first:
                        begin()
                    log.write(f"{life} {done} {monotonic()} {world.total(loss).item().hex()}\n")
                    state.keep(done, model=model, optimizer=optimizer, feed=feed)
                    if done >= until and life >= options.kills:
                        break


if __name__ == "__main__":
    sys.exit(main())
