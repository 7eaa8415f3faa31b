"""What light observation costs: blocks of steps with and without it, in turn, in one process.

    python bench/light_cost.py [--device cpu|cuda] [--out FILE]

Three loops: a tiny MLP (about a millisecond a step), a list of layers that are called one by one from the loop, and a small GPT.
Prints the median ratio observed / plain, 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.machine.measure.stats import ratio_estimate

LIGHT = Schedule(
    num_warm_up=1,
    num_light_before=1,
    num_reads=0,
    num_kernels=0,
    num_memory=0,
    num_deep=0,
    trials_budget_s=0.0,
    observe_s=1e9,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    result: dict[str, object] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    is_cpu = options.device == "cpu"
    for name, make, steps, rounds in (
        ("mlp", mlp, 500, 121 if is_cpu else 61),
        ("layers", layers, 200, 61 if is_cpu else 31),
        ("gpt", gpt, 8 if is_cpu else 60, 31 if is_cpu else 15),
    ):
        ratio = measure(make(torch.device(options.device)), steps, rounds)
        result[name] = ratio
        low, high = ratio["low"], ratio["high"]
        print(f"{name}: observed / plain {ratio['value']:.4f} ({low:.4f} - {high:.4f}), n = {ratio['num_samples']}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(step: Callable[[], object], steps: int, rounds: int) -> dict[str, float]:
    for _ in range(steps):
        step()
    plain, observed = [], []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        for is_observed in order:
            (observed if is_observed else plain).append(block(step, steps, is_observed=is_observed))
    estimate = ratio_estimate(observed, plain)
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "num_samples": estimate.num_samples,
        "step_s": min(plain),
    }


def block(step: Callable[[], object], steps: int, *, is_observed: bool) -> float:
    """Seconds of one step, the mean of a block."""
    num_before = max(12, steps // 3)  # past the start: first calls and lines met for the first time cost once
    if not is_observed:
        timed(step, num_before)
        return timed(step, steps)
    capture = Capture(command=("bench",), cwd=".", schedule=LIGHT, machine=None, propose=lambda _: ())
    capture.start()
    timed(step, num_before)
    seconds = timed(step, steps)
    capture.finish(exit="", exit_code=0)
    return seconds


def timed(step: Callable[[], object], steps: int) -> float:
    start = perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # noqa: TID251  # the end of a whole block, not of a step
    return (perf_counter() - start) / steps


def mlp(device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    ).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    x, y = torch.randn(128, 64, device=device), torch.randint(0, 10, (128,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def layers(device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(128, 128) for _ in range(24)]).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(256, 128, device=device)

    def step() -> None:
        h = x
        for layer in net:
            h = torch.tanh(layer(h))
        optimizer.zero_grad()
        h.square().mean().backward()
        optimizer.step()

    return step


def gpt(device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
    net = nn.Sequential(
        nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 256)
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.randint(0, 256, (8, 129), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
