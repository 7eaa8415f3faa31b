"""Python calls of a training step: a plain loop, the same with flatout's blocks, with Lightning Fabric, with Accelerate.

    python bench/loop_overhead.py [--out bench/results/<date>-<hardware>/loop_overhead.json]

Calls of Python functions (the interpreter's 'call' events in the loop's own thread) in a step of an MLP on a CPU, median over 50
steps; what the plain loop makes of them is torch's own. The blocks: Batches and Feed, part_of_mean, Precision (off), clipping, a
schedule, NanWatch, Run.tick.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any

import accelerate
import lightning
import torch
from torch import Tensor, nn

import flatout

NUM_STEPS, WARM_UP = 60, 10
SAMPLES = torch.randn(64 * (NUM_STEPS + 2), 32)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    return net, torch.optim.AdamW(net.parameters(), fused=True)


def plain() -> Iterator[None]:
    net, optimizer = model_and_optimizer()
    for at in range(NUM_STEPS):
        x = SAMPLES[64 * at : 64 * (at + 1)]
        loss = net(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def blocks() -> Iterator[None]:
    net, optimizer = model_and_optimizer()
    world = flatout.World("cpu")
    net = world.place(net)
    batches = flatout.Batches([1] * len(SAMPLES), 64)
    feed: flatout.Feed[Tensor] = flatout.Feed(SAMPLES, batches)
    rate = flatout.warm_up_cosine(1e-3, warm_up=5, steps=NUM_STEPS)
    precision, watch = flatout.Precision("float32"), flatout.NanWatch()
    with tempfile.TemporaryDirectory() as folder, flatout.Run(folder, fingerprint_steps=0) as run:
        for number, x in enumerate(feed):
            with precision:
                loss = world.part_of_mean(net(x).square().sum(), batches.step(number).num_samples)
            precision.backward(loss)
            flatout.set_rate(optimizer, rate(number))
            precision.update(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            watch(loss)
            run.tick(loss=loss)
            yield


def fabric() -> Iterator[None]:
    net, optimizer = model_and_optimizer()
    it = lightning.Fabric(accelerator="cpu", devices=1)
    net, optimizer = it.setup(net, optimizer)
    loader = it.setup_dataloaders(torch.utils.data.DataLoader(SAMPLES, batch_size=64))
    for x in loader:
        loss = net(x).square().mean()
        it.backward(loss)
        it.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def accelerated() -> Iterator[None]:
    net, optimizer = model_and_optimizer()
    it = accelerate.Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    net, optimizer, loader, schedule = it.prepare(
        net, optimizer, torch.utils.data.DataLoader(SAMPLES, batch_size=64), schedule
    )
    for x in loader:
        with it.accumulate(net):
            loss = net(x).square().mean()
            it.backward(loss)
            it.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield


def calls(loop: Callable[[], Iterator[None]]) -> float:
    """Median Python calls of a step."""
    counted: list[int] = []
    count, here = 0, get_ident()

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and get_ident() == here  # other threads are profiled too

    steps = loop()
    for _ in range(NUM_STEPS - 5):
        count = 0
        sys.setprofile(seen)
        next(steps)
        sys.setprofile(None)
        counted.append(count)
    steps.close()
    return median(counted[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found = {
        name: calls(loop)
        for name, loop in (("plain", plain), ("flatout", blocks), ("fabric", fabric), ("accelerate", accelerated))
    }
    record = {
        "calls_a_step": found,
        "extra": {name: n - found["plain"] for name, n in found.items()},
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
