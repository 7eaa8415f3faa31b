"""A training that dies where its plan says: `train.py FOLDER STEPS PLAN`, under `flatout survive` or torchrun.

PLAN is a JSON list of {"phase", "rank", "step" or "restart", "how"}; each is done once, in all lives of the job together, unless
it has "always". Each rank appends "restart step time loss" to FOLDER/log-RANK, and when it begins, its time and process to
FOLDER/begun-RANK. OPTIONS may have `pace_s`, seconds to sleep in each step, and a folder of `memory`, with {node} for NODE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn

import flatout
from flatout.blocks.elastic import memory_slots as slots
from flatout.blocks.elastic import survivor
from flatout.blocks.elastic.messages import rank_context
from flatout.blocks.training import checkpoint_files, checkpoint_parts

FOLDER, STEPS, PLAN = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
OPTIONS = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
RESTART, RANK = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("RANK", "0"))
DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
DEVICE_SLOT = int(DEVICES[int(os.environ.get("LOCAL_RANK", "0"))])
now = {"step": -1}


def come_to(phase: str) -> None:
    """Die here, if that is planned."""
    for number, entry in enumerate(PLAN):
        here = {"phase": phase, "rank": RANK, "step": now["step"], "restart": RESTART, "device_slot": DEVICE_SLOT}
        wanted = {name: value for name, value in entry.items() if name in here}
        if any(here[name] != value for name, value in wanted.items()) or wanted.get("phase") != phase:
            continue
        if not entry.get("always"):
            try:
                os.close(os.open(FOLDER / f"done-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
        die(entry.get("how", "kill"))


def die(how: str) -> None:
    (FOLDER / f"killed-{RESTART}").write_text(f"{monotonic()}")
    if how == "raise":
        raise ValueError(f"no number can be {now['step']}")
    if how == "fork server":  # this node's memory is lost, too
        for path in rank_context().memory.glob("*-of-*"):
            path.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    if how in ("corrupt", "tear"):
        spoil(how)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def spoil(how: str) -> None:
    """Of this rank's copies the newest."""
    paths = sorted(rank_context().memory.glob(f"own-{RANK:05}-of-*"), key=lambda p: slots.MemorySlot(p).head or (-1,))
    with paths[-1].open("r+b") as file:
        file.seek(0 if how == "tear" else 4096 + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def before(module: Any, name: str, phase: str, number: int = 1) -> None:
    """Come to a phase at the `number`th call of a function of the package."""
    inner, calls = getattr(module, name), {"now": 0, "step": -1}

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.update(now=1, step=now["step"]) if calls["step"] != now["step"] else calls.update(now=calls["now"] + 1)
        if calls["now"] == number:
            come_to(phase)
        return inner(*args, **kwargs)

    setattr(module, name, watched)


before(slots.MemorySlot, "_copied", "copy", 3)
before(slots.MemorySlot, "seal", "seal")
before(checkpoint_files, "write_tensors", "disk")
before(checkpoint_files, "publish", "publish")
before(checkpoint_parts, "set_random_state", "recovery")
for entry in PLAN:
    if entry.get("phase") == "any" and (entry["rank"], entry["restart"]) == (RANK, RESTART):
        timer = threading.Timer(entry["after_s"], die, ("kill",))
        timer.daemon = True
        timer.start()


def main() -> None:
    device = OPTIONS.get("device", "cpu")
    with flatout.World(device) as world:
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
        model = world.place(nn.Sequential(*layers, nn.Linear(32, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        lengths = [1 + (7 * i) % 11 for i in range(160)]
        batches = flatout.Batches(lengths, 24, rank=world.rank, num_ranks=world.num_ranks, seed=3)
        feed = flatout.Feed([torch.randn(n, 32) for n in lengths], batches, device=world.device)
        torch.manual_seed(world.rank)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "feed": feed}
        log = (FOLDER / f"log-{world.rank}").open("a", buffering=1)
        with (FOLDER / f"begun-{world.rank}").open("a") as begun:
            begun.write(f"{monotonic()} {os.getpid()}\n")
        with survivor.Survivor(
            FOLDER / "disk",
            disk_every=OPTIONS.get("disk_every", 3),
            buddy=OPTIONS.get("buddy", "nodes"),
            memory=OPTIONS.get("memory", "/dev/shm").format(node=os.environ.get("NODE", "")),
        ) as state:
            done = now["step"] = state.resume(**parts)
            while done < STEPS:
                for batch in feed:
                    come_to("forward")
                    sleep(OPTIONS.get("pace_s", 0.0))
                    loss = model(batch.values).square().mean()
                    come_to("backward")
                    loss.backward()
                    come_to("optimizer")
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    total = world.total(loss).item()
                    done = now["step"] = done + 1
                    log.write(f"{RESTART} {done} {monotonic()} {total.hex()}\n")
                    state.keep(done, **parts)
                    if done == STEPS:
                        break


main()
