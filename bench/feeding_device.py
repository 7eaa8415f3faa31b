"""A transformer over ragged data on several GPUs: packed and planned batches beside padded group_by_length.

    torchrun --nproc-per-node 2 bench/feeding_device.py --out OUT.json      (on CPUs with gloo: a toy, to see that it runs)

The same model, optimizer and samples a step on both sides, bf16 autocast on GPUs, eager. Padded: transformers'
LengthGroupedSampler sharded as Accelerate does, from a DataLoader with two workers and pinned memory, SDPA with a key mask.
Packed: Batches and Ragged, attention over the documents of a batch by PyTorch's variable-length kernel (on a CPU document by
document). Stretches of steps in turn; seconds a real token over all ranks, medians of ratios with intervals; the losses of both
sides at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

import flatout
from flatout.machine.cost.batching import transformer_cost
from flatout.machine.measure.stats import ratio_estimate

LONGEST, VOCAB = 2048, 4096
WARM_UP = 12
"""Stretches of each side before the first that counts, an epoch and more: each new shape has memory to be found for it."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        x = x + self.proj(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """Tokens of any leading shape, an attention that knows how they lie; a loss per token."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def packed_attention(batch: flatout.Ragged) -> Any:
    """Over (T, 3 * width)."""

    def attend(qkv: Tensor, heads: int) -> Tensor:
        q, k, v = qkv.view(qkv.size(0), 3, heads, -1).unbind(1)
        if q.is_cuda:
            from torch.nn.attention.varlen import varlen_attn

            offsets = batch.offsets.int()
            return varlen_attn(q, k, v, offsets, offsets, batch.longest, batch.longest).flatten(1)
        parts = [
            F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in part))[0].transpose(0, 1)
            for part in zip(*(t.split(batch.lengths.tolist()) for t in (q, k, v)), strict=True)
        ]
        return torch.cat(parts).flatten(1)

    return attend


def padded_attention(mask: Tensor) -> Any:
    """Over (N, L, 3 * width)."""

    def attend(qkv: Tensor, heads: int) -> Tensor:
        q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)

    return attend


def shifted(tokens: Tensor) -> Tensor:
    """What is to be predicted: a function of each token and one of 16 at random, so that log(16) of the loss stays."""
    return (tokens * 7 + 3 + torch.randint_like(tokens, 16)) % VOCAB


class Side(ABC):
    """One way to feed: a model of its own, and steps."""

    def __init__(self, world: flatout.World, shape: tuple[int, int, int]) -> None:
        torch.manual_seed(0)
        self.world = world
        self.model = world.place(Encoder(*shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.precision = flatout.Precision(
            "bfloat16" if world.device.type == "cuda" else "float32", device=world.device
        )
        self.losses: list[Tensor] = []
        self.steps = self.run()

    @abstractmethod
    def run(self) -> Iterator[int]:
        """Real tokens of each step, of all ranks."""

    def learn(self, loss_sum: Tensor, num_tokens: int) -> None:
        loss = self.world.part_of_mean(loss_sum, num_tokens)
        self.precision.backward(loss)
        self.precision.update(self.optimizer, max_norm=1.0)
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def wait(self) -> None:
        """Until all ranks are through: the host reads a loss."""
        self.world.total(self.losses[-1]).item()

    def losses_by(self, width: int, num: int) -> list[tuple[float, float]]:
        """Mean and standard deviation of the first steps' losses, by windows."""
        means = self.world.total(torch.stack(self.losses[: width * num])) / self.world.num_ranks
        return [(w.mean().item(), w.std().item()) for w in means.split(width)]


class Packed(Side):
    def __init__(self, world: flatout.World, shape: tuple[int, int, int], texts: list[Tensor], size: int) -> None:
        cost = transformer_cost(shape[0])
        self.batches = flatout.Batches(map(len, texts), size, rank=world.rank, num_ranks=world.num_ranks, cost=cost)
        self.feed: flatout.Feed[flatout.Ragged] = flatout.Feed(texts, self.batches, device=world.device)
        super().__init__(world, shape)

    def run(self) -> Iterator[int]:
        for epoch in range(10**6):
            for number, batch in enumerate(self.feed):
                step = self.batches.step(number, epoch)
                with self.precision:
                    out = self.model(batch.values, batch.positions, packed_attention(batch))
                    loss = F.cross_entropy(out.float(), shifted(batch.values), reduction="sum")
                self.learn(loss, step.num_tokens)
                yield step.num_tokens


class Order:
    """transformers' LengthGroupedSampler, sharded as Accelerate does: a global batch's parts to the ranks in turn."""

    def __init__(self, lengths: list[int], size: int, world: flatout.World) -> None:
        self.lengths, self.size, self.world, self.epoch = lengths, size, world, 0

    def __iter__(self) -> Iterator[list[int]]:
        per_rank = self.size // self.world.num_ranks
        drawn = torch.Generator().manual_seed(self.epoch)
        order = list(LengthGroupedSampler(per_rank, lengths=self.lengths, generator=drawn))
        self.epoch += 1
        for at in range(0, len(order) - self.size + 1, self.size):
            yield order[at : at + self.size]


class Padded(Side):
    def __init__(self, world: flatout.World, shape: tuple[int, int, int], texts: list[Tensor], size: int) -> None:
        per_rank, rank = size // world.num_ranks, world.rank

        def collated(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, int]:
            mine = [tokens for tokens, _ in items[rank * per_rank : (rank + 1) * per_rank]]
            padded = nn.utils.rnn.pad_sequence(mine, batch_first=True)
            lengths = torch.tensor([len(tokens) for tokens in mine])
            return padded, torch.arange(padded.size(1)) < lengths[:, None], sum(num for _, num in items)

        self.loader: DataLoader[Any] = DataLoader(
            [(text, len(text)) for text in texts],  # type: ignore[arg-type]
            batch_sampler=Order([len(t) for t in texts], size, world),
            collate_fn=collated,
            num_workers=2,
            pin_memory=world.device.type == "cuda",
            persistent_workers=True,
        )
        iter(self.loader)  # its processes are started before there is anything on a device
        super().__init__(world, shape)

    def run(self) -> Iterator[int]:
        while True:
            for on_host, mask_on_host, num_tokens in self.loader:
                tokens = on_host.to(self.world.device, non_blocking=True)
                mask = mask_on_host.to(self.world.device, non_blocking=True)
                places = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
                with self.precision:
                    out = self.model(tokens, places, padded_attention(mask))
                    losses = F.cross_entropy(out.float().flatten(0, 1), shifted(tokens).flatten(), reduction="none")
                self.learn((losses * mask.flatten()).sum(), num_tokens)
                yield num_tokens


def stretch(side: Side, num: int) -> float:
    """Seconds a real token, over a stretch of steps of all ranks."""
    began, tokens = perf_counter(), 0
    for _ in range(num):
        tokens += next(side.steps)
    side.wait()
    return (perf_counter() - began) / tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="of a stretch")
    options = parser.parse_args()
    with flatout.World() as world:
        on_gpu = world.device.type == "cuda"
        shape, per_rank, num = ((768, 12, 12), 32, 6_400) if on_gpu else ((32, 2, 2), 4, 400)
        draw = random.Random(0)
        torch.manual_seed(0)
        lengths = [max(1, min(LONGEST if on_gpu else 128, round(draw.lognormvariate(4.88, 0.9)))) for _ in range(num)]
        texts = [torch.randint(VOCAB, (n,)) for n in lengths]
        size = per_rank * world.num_ranks
        sides = {"padded": Padded(world, shape, texts, size), "packed": Packed(world, shape, texts, size)}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.pairs + WARM_UP):
            for name in sides if number % 2 else list(sides)[::-1]:
                seconds = stretch(sides[name], options.steps)
                if number >= WARM_UP:
                    taken[name].append(seconds)
        ratio = ratio_estimate(taken["padded"], taken["packed"])
        record = {
            "packed_over_padded": [ratio.value, ratio.low, ratio.high],
            "stretches_tokens_per_s": {name: [round(1 / x) for x in s] for name, s in taken.items()},
            "tokens_per_s": {name: 1 / median(s) for name, s in taken.items()},
            "losses_by_20_steps": {name: side.losses_by(20, 6) for name, side in sides.items()},
            "ranks": world.num_ranks,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        if world.is_first:
            print(json.dumps(record, indent=1))
            if options.out is not None:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
