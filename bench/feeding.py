"""Ragged data shared out to ranks: padding, idle time at the barrier, noise and planning time, beside what peers do.

    python bench/feeding.py --out bench/results/<date>-<hardware>/feeding.json

Four distributions of 50 000 lengths, 8 ranks, 32 sequences a rank and step; once more with so few that the largest sample costs
more than a rank's mean share. Cost of a sample of L tokens: L + L^2 / (6 * 768), of a padded batch that of its longest times its
samples. Peers choose the samples with their own code (transformers' samplers, Accelerate's shards); padding, idle time and noise
are computed for all of them alike. Nothing but planning is timed here; speed on devices is bench/feeding_device.py's.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from flatout.blocks.data.batches import Batches
from flatout.blocks.data.rows import Rows
from flatout.machine.cost.batching import idle_fraction, transformer_cost, variance_inflation

NUM_SAMPLES = 50_000
NUM_RANKS = 8
PER_RANK = 32
LONGEST = 2048
COST = transformer_cost(768)
NUM_STEPS = 2000
Ranks = list[list[int]]


def log_normal(draw: random.Random) -> int:
    """As text is: mean 198."""
    return max(1, min(LONGEST, round(draw.lognormvariate(4.88, 0.9))))


def bimodal(draw: random.Random) -> int:
    """Questions and documents."""
    return max(1, min(LONGEST, round(draw.gauss(60, 15) if draw.random() < 0.8 else draw.gauss(900, 150))))


def heavy_tail(draw: random.Random) -> int:
    """As files of code are: Pareto, exponent 1.2."""
    return max(1, min(LONGEST, round(40 * draw.paretovariate(1.2))))


def near_constant(draw: random.Random) -> int:
    return round(draw.gauss(256, 8))


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": log_normal,
    "bimodal": bimodal,
    "code-like heavy tail": heavy_tail,
    "near-constant": near_constant,
}


class Method(NamedTuple):
    """Steps of one way to batch: the samples of each rank; whether they are padded to the rank's longest."""

    steps: Iterator[Ranks]
    is_padded: bool


def shuffled(lengths: list[int], per_rank: int) -> Iterator[Ranks]:
    """Uniform, consecutive samples to each rank: what a DistributedSampler amounts to."""
    size = per_rank * NUM_RANKS
    for epoch in range(10**6):
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(0, len(order) - size + 1, size):
            yield [order[at + r * per_rank : at + (r + 1) * per_rank] for r in range(NUM_RANKS)]


def grouped(lengths: list[int], per_rank: int) -> Iterator[Ranks]:
    """transformers' group_by_length, sharded by Accelerate: batches of neighbours, one to each rank in turn."""
    for epoch in range(10**6):
        sampler = LengthGroupedSampler(per_rank, lengths=lengths, generator=torch.Generator().manual_seed(epoch))
        yield from sharded(BatchSampler(list(sampler), per_rank, drop_last=True))


def accelerated(lengths: list[int], per_rank: int) -> Iterator[Ranks]:
    """Accelerate's shards of a shuffle."""
    for epoch in range(10**6):
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
        yield from sharded(BatchSampler(order, per_rank, drop_last=True))


def sharded(batches: BatchSampler) -> Iterator[Ranks]:
    shards = [BatchSamplerShard(batches, NUM_RANKS, rank, even_batches=False) for rank in range(NUM_RANKS)]
    yield from map(list, zip(*shards, strict=False))


def rebalanced(lengths: list[int], per_rank: int) -> Iterator[Ranks]:
    """transformers' batch_rebalance."""
    for epoch in range(10**6):
        samplers = [
            BatchRebalanceSampler(lengths, per_rank * NUM_RANKS, NUM_RANKS, 1, seed=epoch, rank=rank)
            for rank in range(NUM_RANKS)
        ]
        yield from map(list, zip(*samplers, strict=True))


def planned(plan: Batches) -> Iterator[Ranks]:
    for epoch in range(10**6):
        for number in range(plan.num_steps(epoch)):
            yield [[i for micro in rank for i in micro] for rank in plan.step(number, epoch).ranks]


def judged(lengths: list[int], method: Method, num_steps: int) -> dict[str, float]:
    """What a method is worth over so many steps."""
    rows: list[list[float]] = []
    batches: list[list[int]] = []
    over: list[float] = []
    filled = taken = 0
    for ranks in islice(method.steps, num_steps):
        sizes = [[lengths[i] for i in rank] for rank in ranks]
        if method.is_padded:
            rows.append([len(rank) * COST.of(max(rank)) for rank in sizes])
            taken += sum(len(rank) * max(rank) for rank in sizes)
        else:
            rows.append([sum(map(COST.of, rank)) for rank in sizes])
            taken += sum(map(sum, sizes))
        filled += sum(map(sum, sizes))
        batches.append([n for rank in sizes for n in rank])
        over.append(sum(map(COST.of, batches[-1])) / NUM_RANKS / COST.of(max(batches[-1])))
    return {
        "padding": 1 - filled / taken,
        "idle": idle_fraction(rows),
        "vif": variance_inflation(batches),
        "mean_over_largest": fmean(over),
    }


def compared(lengths: list[int], size: int, num_steps: int) -> dict[str, dict[str, float]]:
    """All methods on one distribution, `size` samples a step; peers, which give each rank as many, with the nearest multiple."""
    per_rank = round(size / NUM_RANKS)
    plans = {
        f"flatout, max_vif {most:g}": Batches(lengths, size, num_ranks=NUM_RANKS, cost=COST, max_vif=most)
        for most in (1.0, 2.0, 3.5)
    }
    methods = {
        "shuffle, padded": Method(shuffled(lengths, per_rank), True),
        "Accelerate's shards, padded": Method(accelerated(lengths, per_rank), True),
        "transformers group_by_length, padded": Method(grouped(lengths, per_rank), True),
        "transformers batch_rebalance, padded": Method(rebalanced(lengths, per_rank), True),
        "shuffle, packed": Method(shuffled(lengths, per_rank), False),
        **{name: Method(planned(plan), False) for name, plan in plans.items()},
    }
    found = {name: judged(lengths, method, num_steps) for name, method in methods.items()}
    for name, plan in plans.items():
        found[name]["planning_ms_a_step"] = planning_ms(plan)
    return found


def planning_ms(plan: Batches) -> float:
    """Median over epochs that were not planned before, the shuffle included."""
    taken = []
    for epoch in range(1000, 1007):
        began = perf_counter()
        num = plan.num_steps(epoch)
        for number in range(num):
            plan.step(number, epoch)
        taken.append((perf_counter() - began) / num * 1e3)
    return median(taken)


def rows_of(lengths: list[int], num_steps: int) -> dict[str, float]:
    """Fixed rows of LONGEST tokens, 4 to a rank."""
    plan = Rows(lengths, LONGEST, 4, num_ranks=NUM_RANKS, cost=COST)
    report = plan.report(num_steps=num_steps)
    taken = []
    for epoch in range(1000, 1005):
        began = perf_counter()
        num = plan.num_steps(epoch)
        for number in range(num):
            plan.step(number, epoch)
        taken.append((perf_counter() - began) / num * 1e3)
    return {"waste": report.waste_fraction, "idle": report.idle_fraction, "planning_ms_a_step": median(taken)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, draws in DISTRIBUTIONS.items():
        draw = random.Random(0)
        lengths = [draws(draw) for _ in range(NUM_SAMPLES)]
        found[name] = {
            "mean": fmean(lengths),
            "longest": max(lengths),
            f"{PER_RANK * NUM_RANKS} sequences a step": compared(lengths, PER_RANK * NUM_RANKS, options.steps),
            "fixed rows": rows_of(lengths, options.steps // 10),
        }
        few = size_for(lengths, 0.8)
        if few is not None:
            found[name][f"{few} sequences a step"] = compared(lengths, few, options.steps)
        print(name, json.dumps(found[name], indent=1), flush=True)
    record = {
        "distributions": found,
        "num_samples": NUM_SAMPLES,
        "num_ranks": NUM_RANKS,
        "num_steps": options.steps,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(record))
    return 0


def size_for(lengths: list[int], wanted: float) -> int | None:
    """Samples a step at which a rank's mean cost is about `wanted` of its batch's largest sample; None where none comes near."""
    seen = {
        size: Batches(lengths, size, num_ranks=NUM_RANKS, cost=COST).report(num_steps=1000).mean_over_largest
        for size in range(NUM_RANKS, 8 * PER_RANK)
    }
    size = min(seen, key=lambda s: abs(seen[s] - wanted))
    return size if abs(seen[size] - wanted) < 0.05 else None


def table(record: dict[str, Any]) -> str:
    lines = [
        "# Ragged batches over 8 ranks",
        "",
        f"Made by `bench/feeding.py`: {record['num_samples']} samples, {record['num_steps']} steps; torch {record['torch']}, "
        f"transformers {record['transformers']}, accelerate {record['accelerate']}. Padding: share of tokens. Idle: share of the "
        "ranks' time at the barrier, by cost. VIF: variance of a batch's mean length over a uniform shuffle's.",
    ]
    for name, found in record["distributions"].items():
        lines += ["", f"## {name}: mean {found['mean']:.0f}, longest {found['longest']}"]
        for kind, methods in found.items():
            if not kind.endswith("a step"):
                continue
            over = methods["shuffle, packed"]["mean_over_largest"]
            lines += ["", f"{kind}; a rank's mean cost is {over:.2f} of the batch's largest sample", ""]
            lines += ["| method | padding | idle | VIF | planning, ms a step |", "|---|---|---|---|---|"]
            lines += [
                f"| {m} | {f['padding']:.1%} | {f['idle']:.2%} | {f['vif']:.2f} | {f.get('planning_ms_a_step', math.nan):.2f} |"
                for m, f in methods.items()
            ]
        rows = found["fixed rows"]
        lines += [
            "",
            f"Fixed rows of {LONGEST} tokens, 4 to a rank: waste {rows['waste']:.2%}, idle {rows['idle']:.2%}, planning "
            f"{rows['planning_ms_a_step']:.2f} ms a step",
        ]
    return "\n".join(lines).replace("nan", "-") + "\n"


if __name__ == "__main__":
    sys.exit(main())
