"""The layouts that fit a cluster, ranked by the seconds of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from msgspec import structs

from flatout.cost.roofline import memory_bytes, peak_flop_per_s
from flatout.errors import PlanError
from flatout.hardware.catalog import load
from flatout.records.scale import Cluster, Constants, Layout, ModelShape, Ranked, Software, StageMemory, StepTime
from flatout.simulate.calibration import Calibrated
from flatout.simulate.memory import memory_of
from flatout.simulate.step import num_active, num_parameters, step_time

_MOST_PLAYED: Final = 200
"""Layouts whose schedules are played event by event: the best by their bubble's closed form."""
_UNSURE: Final = 0.15
"""Of a step's seconds, where nothing was measured: published planners err by 4 to 15 % (Calculon 2023, vTrain 2024)."""
_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
_CHUNKS: Final = (1, 2, 4)


class Ranking(NamedTuple):
    """The fastest first; how many layouts were looked at, and how many of them do not fit the memory."""

    best: tuple[Ranked, ...]
    num_layouts: int
    num_too_large: int
    smallest: StageMemory | None


def ranked(
    model: ModelShape,
    cluster: Cluster,
    global_batch: int,
    software: Software,
    constants: Constants,
    *,
    most: int = 10,
    calibrated: Calibrated | None = None,
) -> Ranking:
    """The layouts of all devices that fit, the fastest first; by constants, or by those that were `calibrated`.

    Raises PlanError when no layout divides the model and the batch, HardwareError when the data sheet lacks a figure.
    """
    spec = load(cluster.device)
    room = memory_bytes(spec)
    fitting, smallest, num = [], None, 0
    for layout in layouts(model, cluster, global_batch):
        num += 1
        memory = max(memory_of(model, layout, software), key=lambda m: m.total_bytes)
        if smallest is None or memory.total_bytes < smallest.total_bytes:
            smallest = memory
        if memory.total_bytes <= room:
            fitting.append((layout, memory))
    if not num:
        raise PlanError(
            f"no layout divides {model.heads} heads, {model.layers} layers and a batch of {global_batch} over "
            f"{cluster.num_devices} devices; give another batch or number"
        )
    constants = calibrated.constants if calibrated is not None else constants
    quick = [(_quick_s(model, layout, cluster, software, constants), layout, memory) for layout, memory in fitting]
    quick.sort(key=lambda one: one[0])
    found = []
    for _, layout, memory in quick[:_MOST_PLAYED]:
        step = step_time(model, layout, cluster, software, constants)
        low_s, high_s = step.total_s * (1 - _UNSURE), step.total_s * (1 + _UNSURE)
        if calibrated is not None:
            predicted = calibrated.predict(model, layout)
            step, low_s, high_s = _stretched(step, predicted.seconds), predicted.low_s, predicted.high_s
        found.append(
            Ranked(
                layout=layout,
                step=step,
                memory=memory,
                low_s=low_s,
                high_s=high_s,
                mfu=model_flop(model, global_batch)
                / (step.total_s * cluster.num_devices * peak_flop_per_s(spec, software.dtype)),
            )
        )
    found.sort(key=lambda one: one.step.total_s)
    return Ranking(tuple(found[:most]), num, num - len(fitting), smallest)


def _stretched(step: StepTime, total_s: float) -> StepTime:
    """The same parts of another total."""
    factor = total_s / step.total_s
    return StepTime(**{name: factor * getattr(step, name) for name in StepTime.__struct_fields__})


def layouts(model: ModelShape, cluster: Cluster, global_batch: int) -> Iterator[Layout]:
    """All that divide heads, layers and batch evenly over all devices; tensor ranks stay within the nearest tier."""
    devices = cluster.num_devices
    tensors = [
        t
        for t in _divisors(devices)
        if t <= cluster.tiers[0].reach and model.key_heads % t == 0 and model.inner % t == 0
    ]
    for tensor in tensors:
        for pipeline in (p for p in _divisors(devices // tensor) if model.layers % p == 0):
            data = devices // tensor // pipeline
            if global_batch % data == 0:
                yield from _variants(model, tensor, pipeline, data, global_batch)


def _variants(model: ModelShape, tensor: int, pipeline: int, data: int, global_batch: int) -> Iterator[Layout]:
    shards = (1, 3) if data > 1 else (0,)
    for samples, chunks, shard, recompute in product(_MICRO_BATCHES, _CHUNKS, shards, ("none", "selective", "full")):
        if global_batch % (data * samples) or (chunks > 1 and (pipeline == 1 or model.layers % (pipeline * chunks))):
            continue
        micro_batches = global_batch // (data * samples)
        if chunks > 1 and micro_batches % pipeline:
            continue
        yield Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            micro_batch=samples,
            global_batch=global_batch,
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks,
            recompute=recompute,  # type: ignore[arg-type]
            shard=shard,
            is_sequence_parallel=tensor > 1,
        )


def model_flop(model: ModelShape, global_batch: int) -> float:
    """Of one step, nothing computed twice: 6 a parameter that a token meets, and attention's 6 x layers x seq x hidden a token,
    causal (Chowdhery et al., PaLM, 2022, appendix B)."""
    tokens = global_batch * model.seq
    active = num_active(model) * model.layers + num_parameters(model)[1]
    return 6.0 * tokens * active + 6.0 * model.layers * tokens * model.seq * model.hidden


def _quick_s(model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants) -> float:
    """Without playing the schedule: one micro-batch through the stages, and all of them by the bubble's closed form."""
    alone = structs.replace(layout, global_batch=layout.data * layout.micro_batch, schedule="1f1b", chunks=1)
    one = step_time(model, alone, cluster, software, constants)
    work_s = one.compute_s + one.host_s + one.tensor_s
    return work_s * (layout.num_micro_batches + (layout.pipeline - 1) / layout.chunks) + one.data_s + one.optimizer_s


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
