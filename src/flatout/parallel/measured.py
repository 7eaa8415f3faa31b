"""Steps of layouts measured on the devices at hand: their seconds, and the memory that each rank took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final

import torch
import torch.distributed as dist

from flatout.errors import PlanError
from flatout.measure.stats import median
from flatout.measure.timer import host_clock_for
from flatout.parallel.layouts import lay_out
from flatout.parallel.sized import Sized, loss_of
from flatout.parallel.world import World
from flatout.records.scale import Layout, MeasuredStep, ModelShape

_WARM_UP: Final = 2
_STEPS: Final = 15
_FEWEST_STEPS: Final = 3
_ENOUGH_S: Final = 1.5
"""Of measured steps, after which the fewest are enough: what long ones wait for is rarely the host, which varies most."""


def measured_steps(
    shape: ModelShape,
    layouts: Sequence[Layout],
    world: World,
    *,
    limit_s: float,
    mixed: torch.dtype | None = torch.bfloat16,
) -> Iterator[MeasuredStep]:
    """Each layout in turn, until `limit_s` have passed: a model of these sizes, random tokens, AdamW; all ranks call it.

    Seconds are the median of 15 steps (down to 3 of long ones) after 2, of the slowest rank. Bytes are the allocator's peak of
    each rank from the first step on, None on a CPU. A layout that cannot be run here is told with the reason and no seconds. All
    ranks go through the same layouts, and agree on when time is over.
    """
    began = monotonic()
    for layout in layouts:
        if _of_all(monotonic() - began, world) > limit_s:
            return
        try:
            yield _measured(shape, layout, world, mixed)
        except PlanError as e:
            yield MeasuredStep(model=shape, layout=layout, why=str(e))
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(shape: ModelShape, layout: Layout, world: World, mixed: torch.dtype | None) -> MeasuredStep:
    torch.manual_seed(0)
    device = world.device
    size = layout.micro_batch
    example = tuple(torch.zeros(size, shape.seq, dtype=torch.int64) for _ in range(2))
    with _where_made(shape, device):
        model = Sized(shape)
    laid = lay_out(model, layout, world, example=example, mixed=mixed)
    del model
    optimizer = laid.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    samples = size * layout.num_micro_batches
    ids = torch.randint(shape.vocab, (samples, shape.seq), device=device)
    positions = torch.arange(shape.seq, device=device).expand(samples, shape.seq)

    def step() -> None:
        optimizer.zero_grad()
        laid.step(ids, positions, target=ids, loss=loss_of)
        optimizer.step()

    seconds = _median_s(step, world)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = [peak]
    if world.num_ranks > 1:
        peaks = [0] * world.num_ranks
        dist.all_gather_object(peaks, peak)
    return MeasuredStep(
        model=shape, layout=layout, seconds=seconds, peak_bytes=tuple(peaks) if device.type == "cuda" else None
    )


def _where_made(shape: ModelShape, device: torch.device) -> torch.device:
    """On the device where it has room for all of the model, else on the host, which takes longer."""
    if device.type != "cuda" or 4 * _num_parameters(shape) > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device


def _num_parameters(shape: ModelShape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Sized(shape).parameters())


def _median_s(step: Callable[[], None], world: World) -> float:
    clock = host_clock_for(world.device)
    found = []
    for number in range(_WARM_UP + _STEPS):
        if world.num_ranks > 1:
            dist.barrier()

        def whole() -> None:
            step()
            if world.device.type == "cuda":
                torch.cuda.current_stream(world.device).synchronize()

        seconds = clock.elapsed_s(whole, 1)
        seconds = _of_all(seconds, world)
        if number >= _WARM_UP or (number and seconds > _ENOUGH_S / 3):
            found.append(seconds)
        if len(found) >= _FEWEST_STEPS and sum(found) > _ENOUGH_S:  # the same on all ranks
            break
    return median(found)


def _of_all(value: float, world: World) -> float:
    """The largest of all ranks'."""
    if world.num_ranks == 1:
        return value
    told = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)
