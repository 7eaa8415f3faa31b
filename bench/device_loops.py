"""Loops for bench/device_evidence.py: one a kind of work, small enough for a CPU, full size on a GPU.

    python bench/device_loops.py NAME [--steps 80] [--vocab 50257] [--trace FILE] [--live FILE]

NAME is gpt, conv, ragged, overhead, sync, ddp or fsdp (the last two under torchrun). `--trace` profiles further steps with
torch.profiler alone and exports them; `--live` observes the loop with flatout in this process and writes what it saw of the
device, and with `--trace` keeps the trace that it was seen in. The last line printed is JSON: seconds of a step over the second
half of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROFILED = 12
CUDA = torch.cuda.is_available()
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if CUDA else "cpu"

Step = Callable[[int], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))


def gpt(vocab: int) -> Step:
    """Bound by the device: GPT-2 small in bfloat16; batches come from pinned memory, asynchronously."""
    width, heads, layers, batch, length = (768, 12, 12, 8, 1024) if CUDA else (32, 2, 1, 2, 16)
    model = GPT(vocab, width, heads, layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=CUDA)
    data = torch.randint(vocab, (8, batch, length + 1))
    data = data.pin_memory() if CUDA else data

    def step(i: int) -> Tensor:
        tokens = data[i % 8].to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.partition(":")[0], dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def conv(vocab: int) -> Step:
    """Convolutions in float32; each batch comes from pageable memory and blocks the host."""
    width, batch, size = (128, 256, 64) if CUDA else (4, 2, 8)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(4, batch, 3, size, size), torch.randint(10, (4, batch))

    def step(i: int) -> Tensor:
        loss = F.cross_entropy(model(images[i % 4].to(DEVICE)), labels[i % 4].to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ragged(vocab: int) -> Step:
    """Sequences of different lengths one after another, in another order in each step: kernels of every size."""
    width, num, longest = (512, 24, 900) if CUDA else (16, 3, 12)
    model = nn.Sequential(Block(width, 8), Block(width, 8), nn.Linear(width, width)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    lengths = [4 + (7919 * j) % longest for j in range(num)]
    rows = [torch.randn(1, n, width, device=DEVICE) for n in lengths]

    def step(i: int) -> Tensor:
        turn = i % num
        loss = torch.stack([model(row).square().mean() for row in rows[turn:] + rows[:turn]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def overhead(vocab: int) -> Step:
    """Bound by the host: hundreds of tiny operators."""
    model = nn.ModuleList([nn.Linear(32, 32) for _ in range(40 if CUDA else 4)]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 32, device=DEVICE)

    def step(i: int) -> Tensor:
        h = x
        for layer in model:
            h = torch.tanh(layer(h)) + 0.1 * h
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def sync(vocab: int) -> Step:
    """Products that keep the device busy, and a wait for it in the middle of each step."""
    size, num = (2048, 12) if CUDA else (16, 2)
    weight = torch.randn(size, size, device=DEVICE, requires_grad=True)
    x = torch.randn(size, size, device=DEVICE)
    optimizer = torch.optim.SGD([weight], lr=1e-9)

    def step(i: int) -> Tensor:
        h = x
        for _ in range(num):
            h = torch.tanh(h @ weight)
        if CUDA:
            torch.cuda.current_stream().synchronize()
        loss = h.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp(vocab: int) -> Step:
    """A GPT on several ranks, gradients reduced in buckets; gloo where there is no GPU."""
    return replicated(vocab, nn.parallel.DistributedDataParallel)


def fsdp(vocab: int) -> Step:
    """The same with parameters, gradients and optimizer state sharded over the ranks, block by block (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    def shard(model: GPT) -> nn.Module:
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    return replicated(vocab, shard)


def replicated(vocab: int, wrap: Callable[[GPT], nn.Module]) -> Step:
    torch.distributed.init_process_group("nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(DEVICE)
    width, heads, layers, batch, length = (768, 12, 12, 4, 1024) if CUDA else (32, 2, 1, 2, 16)
    model = wrap(GPT(vocab, width, heads, layers).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), fused=CUDA)
    data = torch.randint(vocab, (4, batch, length + 1), device=DEVICE)

    def step(i: int) -> Tensor:
        tokens = data[i % 4]
        with torch.autocast(DEVICE.partition(":")[0], dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


LOOPS: dict[str, Callable[[int], Step]] = {f.__name__: f for f in (gpt, conv, ragged, overhead, sync, ddp, fsdp)}


def profiled(path: str) -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if CUDA else [ProfilerActivity.CPU]
    return profile(activities=activities, on_trace_ready=lambda p: p.export_chrome_trace(path))


def run(step: Step, steps: int, trace: str) -> float:
    """Seconds of a step over the second half of the steps; then further steps are profiled, if asked."""
    loss = step(0)
    for i in range(1, steps):
        if i == steps // 2:
            loss.item()
            began = perf_counter()
        loss = step(i)
    loss.item()
    step_s = (perf_counter() - began) / (steps - steps // 2)
    with profiled(trace) if trace else nullcontext():
        for i in range(PROFILED if trace else 0):
            loss = step(steps + i)
        loss.item()
    return step_s


def live(step: Step, steps: int, path: str, trace: str) -> None:
    """Observe the loop with flatout in this process; write what it saw of the device, and the first trace it saw it in."""
    from flatout.check.capture import Capture
    from flatout.check.observe.collectors.kernels import KernelProfiling
    from flatout.check.observe.device import kernels
    from flatout.check.observe.steps.schedule import Schedule
    from flatout.core.records.record import to_json

    read_trace = kernels.read_trace

    def keeping(file: Path) -> Any:
        if trace and not Path(trace).exists():
            shutil.copy(file, trace)
        return read_trace(file)

    kernels.read_trace = keeping
    schedule = Schedule(trials_budget_s=0.0, observe_s=5.0)
    capture = Capture(command=("device_loops",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    capture.start()
    for i in range(steps):
        step(i)
    evidence = capture.finish(exit="finished", exit_code=0)
    times = capture.observation.collector(KernelProfiling).times
    collectives = [json.loads(to_json(c)) for c in times.collectives]
    profiled_step = times.device_step
    found = {
        "evidence": json.loads(to_json(evidence)),
        "collectives": collectives,
        "profiled": profiled_step and json.loads(to_json(profiled_step)),
        "window_us": times._timed and [ns / 1e3 for ns in times._timed.window],
    }
    Path(path).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=sorted(LOOPS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--vocab", type=int, default=50257 if CUDA else 97)
    parser.add_argument("--trace", default="")
    parser.add_argument("--live", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    step = LOOPS[args.loop](args.vocab)
    rank = int(os.environ.get("RANK", "0"))
    if args.live:
        live(step, args.steps, args.live.format(rank=rank), args.trace.format(rank=rank))
        result = {}
    else:
        result = {"step_s": run(step, args.steps, args.trace.format(rank=rank))}
    if args.loop in ("ddp", "fsdp"):
        torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps({"loop": args.loop, **result}))


if __name__ == "__main__":
    main()
