"""What the blocks cost on a GPU: host waits, a NaN watch, copies beside the step, asynchronous checkpoints.

    python bench/loop_device.py [--out bench/results/<date>-<hardware>/loop_device.json] [--small]

A decoder of GPT-2's size in bf16 on random tokens, eager. (1) 100 steps of the full loop with
`torch.cuda.set_sync_debug_mode("error")`; (2) stretches of steps with and without NanWatch in turn, and how late a planted NaN
is told; (3) batches of images that are on the device already, come through a Feed, and are copied by `.to(device)`; (4) stretches
with and without a checkpoint of weights and Adam's state. Times are between events on the device, after the host has let it run
dry. With `--small` on any machine, to see that it runs; without a GPU the times are the host's.
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
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatout
from flatout.core.errors import NotFiniteError
from flatout.machine.measure.stats import median_estimate, ratio_estimate

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.size(1)]
        return self.head(self.norm(self.blocks(x)))


class Training:
    """A model, an optimizer, and tokens that are on the device."""

    def __init__(self, *, is_small: bool, batch: int = 16) -> None:
        torch.manual_seed(0)
        self.vocab, width, layers, self.context, self.batch = (
            (128, 64, 2, 32, 2) if is_small else (50304, 768, 12, 1024, batch)
        )
        self.model = Decoder(self.vocab, width, layers, self.context).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.precision = flatout.Precision("bfloat16", device=DEVICE)
        self.data = torch.randint(self.vocab, (self.batch, self.context + 1), device=DEVICE)

    def loss(self, data: Tensor) -> Tensor:
        with self.precision:
            out = self.model(data[:, :-1])
            return F.cross_entropy(out.flatten(0, 1), data[:, 1:].flatten())

    def step(self) -> Tensor:
        loss = self.loss(self.data)
        self.precision.backward(loss)
        self.precision.update(self.optimizer, max_norm=1.0)
        self.optimizer.zero_grad()
        return loss


def seconds(work: Callable[[], Any], lead: Callable[[], Any] | None = None) -> float:
    """Of the device for what `work` sends it, nothing else under way; after `lead`, as in the middle of a loop."""
    if lead is not None:
        lead()
    if not ON_GPU:
        began_s = perf_counter()
        work()
        return perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def paired(
    one: Callable[[], Any],
    two: Callable[[], Any],
    pairs: int,
    leads: tuple[Callable[[], Any] | None, Callable[[], Any] | None] = (None, None),
) -> tuple[list[float], list[float]]:
    """Seconds of both, in turn, after two of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs + 2):
        order = ((0, one), (1, two)) if number % 2 else ((1, two), (0, one))
        for side, work in order:
            s = seconds(work, leads[side])
            if number >= 2:
                taken[side].append(s)
    return taken


def full_loop(is_small: bool) -> dict[str, Any]:
    """100 steps in which a host that waits raises."""
    lengths = [8 + (7 * i) % 57 for i in range(4000)]
    texts = [torch.randn(n, 64) for n in lengths]
    with (
        tempfile.TemporaryDirectory() as folder,
        flatout.World() as world,
        flatout.Run(folder) as run,
        flatout.Checkpoints(f"{folder}/saves") as saves,
    ):
        net = world.place(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
        optimizer = torch.optim.AdamW(net.parameters(), fused=ON_GPU)
        rate = flatout.warm_up_cosine(1e-3, warm_up=10, steps=120)
        batches = flatout.Batches(lengths, 32, rank=world.rank, num_ranks=world.num_ranks)
        feed: flatout.Feed[flatout.Ragged] = flatout.Feed(texts, batches, device=world.device)
        precision, watch = flatout.Precision("bfloat16", device=world.device), flatout.NanWatch()
        num_checked = 0
        try:
            for number, batch in enumerate(feed):
                if number == 20 and ON_GPU:  # checksums of the first steps are read at once
                    torch.cuda.set_sync_debug_mode("error")
                with precision:
                    loss_sum = net(batch.values).float().square().sum()
                loss = world.part_of_mean(loss_sum, batches.step(number).num_tokens)
                precision.backward(loss)
                flatout.set_rate(optimizer, rate(number))
                precision.update(optimizer, max_norm=1.0)
                optimizer.zero_grad()
                watch(loss)
                run.tick(loss=loss)
                if number in (10, 50, 90):
                    saves.save(number + 1, model=net, optimizer=optimizer, feed=feed)
                num_checked += number >= 20
                if num_checked == 100:
                    break
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
        watch.finish()
    return {"steps_without_a_wait": num_checked, "is_checked": ON_GPU}


def nan_watch(training: Training, pairs: int, num_steps: int) -> dict[str, Any]:
    watch = flatout.NanWatch()

    def plain() -> None:
        for _ in range(num_steps):
            training.step()

    def watched() -> None:
        for _ in range(num_steps):
            watch(training.step())

    one, two = paired(plain, watched, pairs)
    watch.finish()
    ratio = ratio_estimate(two, one)
    late = []
    for bad in range(3, 9):
        watch, at = flatout.NanWatch(), 0
        try:
            for at in range(40):
                loss = training.loss(training.data)
                watch(loss * float("nan") if at == bad else loss)
        except NotFiniteError as e:
            late.append(at - e.step)
    return {
        "step_s": median(one) / num_steps,
        "cost": [ratio.value - 1, ratio.low - 1, ratio.high - 1],
        "steps_late": late,
    }


def prefetched(pairs: int, is_small: bool) -> dict[str, Any]:
    """Images of 64 MiB a batch, beside work that takes about 15 times as long as their copy: cutting the batch takes five.

    The work is bound by memory, so that the clocks stay where they are.
    """
    rows, pixels, numbers = (8, 3 * 32 * 32, 1000) if is_small else (112, 3 * 224 * 224, 1 << 28)
    images = torch.randn(rows * (4 if is_small else 48), pixels, device=DEVICE).cpu()
    batches = flatout.Batches([1] * len(images), rows, seed=0)
    feed: flatout.Feed[Tensor] = flatout.Feed(images, batches, device=DEVICE)
    field = torch.randn(numbers, device=DEVICE)
    resident = images[:rows].to(DEVICE)
    pinned = images[:rows].pin_memory() if ON_GPU else images[:rows]
    copy_s = median(seconds(lambda: pinned.to(DEVICE, non_blocking=True)) for _ in range(20))
    pass_s = median(seconds(field.cos_) for _ in range(20))
    num_passes = max(1, round(15 * copy_s / pass_s)) if ON_GPU else 1

    def work(batch: Tensor) -> None:
        for _ in range(num_passes):
            field.cos_()
        batch.mean()

    def endless() -> Iterator[Tensor]:
        while True:
            yield from feed

    given, table = endless(), images[:rows].clone()
    num = 10

    def there() -> None:
        for _ in range(num):
            work(resident)

    def fed() -> None:
        for _ in range(num):
            work(next(given))

    def plainly() -> None:
        for _ in range(num):
            work(table[torch.arange(rows)].to(DEVICE))

    # a host that begins with a dry device cuts a batch while that waits, which a loop does once
    one, two = paired(there, fed, pairs, (lambda: work(resident), lambda: work(next(given))))
    three, _ = paired(plainly, there, max(3, pairs // 3))
    exposed = [(b - a) / num for a, b in zip(one, two, strict=True)]
    found = median_estimate(exposed)
    copies = feed.copies
    return {
        "batch_bytes": rows * pixels * 4,
        "copy_s": copy_s,
        "step_s": median(one) / num,
        "longer_by_s": [found.value, found.low, found.high],
        "hidden": [1 - found.value / copy_s, 1 - found.high / copy_s, 1 - found.low / copy_s],
        "plain_copy_step_s": median(three) / num,
        "feed_says": copies._asdict() | {"hidden": copies.hidden} if copies is not None else None,
    }


def checkpoints(training: Training, pairs: int, num_steps: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
        flatout.Checkpoints(folder, keep=1) as saves,
    ):
        number = 0

        def plain() -> None:
            for _ in range(num_steps):
                training.step()

        def saving() -> None:
            nonlocal number
            number += 1
            for at in range(num_steps):
                training.step()
                if at == num_steps // 2:
                    saves.save(number, model=training.model, optimizer=training.optimizer)

        one: list[float] = []
        two: list[float] = []
        for at in range(pairs + 2):
            for is_saving in (at % 2 == 0, at % 2 == 1):
                s = seconds(saving if is_saving else plain)
                saves.wait()  # a stretch without a save has nothing under way
                if at >= 2:
                    (two if is_saving else one).append(s)
        step_s = median(one) / num_steps
        stall = median_estimate([(b - a) / step_s for a, b in zip(one, two, strict=True)])
        costs = saves.saved[2:]
    return {
        "step_s": step_s,
        "bytes": costs[-1].num_bytes,
        "stall_of_a_step": [stall.value, stall.low, stall.high],
        "device_copy_s": median(c.device_s for c in costs),
        "device_copy_of_a_step": median(c.device_s for c in costs) / step_s,
        "call_s": median(c.call_s for c in costs),
        "write_s": median(c.write_s for c in costs),
        "first_call_s": saves.saved[0].call_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    pairs, num_steps = (3, 3) if options.small else (15, 10)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }

    def found(name: str, what: dict[str, Any]) -> None:
        record[name] = what
        print(f"{name}: {json.dumps(what, indent=1)}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    found("full_loop", full_loop(options.small))
    found("prefetch", prefetched(pairs, options.small))
    training = Training(is_small=options.small)
    found("nan_watch", nan_watch(training, pairs, num_steps))
    found("checkpoints", checkpoints(training, pairs, num_steps))
    del training
    larger = Training(is_small=options.small, batch=64)
    found("checkpoints_of_larger_steps", checkpoints(larger, 2 * pairs, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
