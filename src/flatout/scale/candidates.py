"""Layouts worth looking at: all that divide a model and a batch over all devices, without those that cannot win."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple, get_args

from flatout.core.records.scale import (
    FOLDED,
    Cluster,
    Compression,
    Layout,
    ModelShape,
    Offload,
    Recompute,
    RecomputedPart,
    ScheduleKind,
)

LONG_TOKENS: Final = 16384
"""Of a sample, from which it is divided by tokens: below, tensor ranks and recomputing cost less."""
_PIECE_TOKENS: Final = 4096
"""Of a sample's piece, at least: smaller ones leave attention too little to do beside the exchange of keys and values."""
_MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
_CHUNKS: Final = (2, 3, 4, 5)
_MANY_CHUNKS: Final = (2, 3, 4, 5, 6, 8, 10, 12)
_SIGN_RANKS: Final = 64
"""From so many on, signs that each rank sends to all are no fewer bytes than whole gradients that are added on their way."""
_UNEVEN: Final = 4
"""Layers a stage, from which stages may have unequal numbers of them: one more is then at most a quarter."""


class Recomputing(NamedTuple):
    """What a backward computes again: of a share of the layers, or the parts that are named."""

    kind: Recompute
    parts: tuple[RecomputedPart, ...] = ()
    share: float = 1.0


NOTHING_OR_ALL: Final = (Recomputing("none"), Recomputing("selective"), Recomputing("full"))
"""What this project's executor can compute again."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """How far to look: whether samples of any length are divided by tokens, what is offloaded and where to, which ways to
    compress gradients are among the candidates, what is computed again, which schedules there are (none named: all), and whether
    embedding and output layer may count as layers where stages get theirs (`counts_ends`, with more chunks a stage)."""

    context_of_any_length: bool = False
    offload: Offload = "none"
    offload_to: Literal["host", "disk"] = "host"
    compressions: tuple[Compression, ...] = ()
    recomputing: tuple[Recomputing, ...] = NOTHING_OR_ALL
    schedules: tuple[ScheduleKind, ...] = ()
    counts_ends: bool = False


def layouts(model: ModelShape, cluster: Cluster, global_batch: int, space: Space | None = None) -> Iterator[Layout]:
    """All that divide heads, layers, tokens, experts and batch over all devices; tensor ranks stay within the nearest tier.

    Left out is what is never faster than something else that is there: GPipe where 1F1B can run (the same bubble, more
    memory), breadth-first (interleaved's bubble, more memory), unsharded optimizers (the same bytes are sent), shards of
    gradients or weights under a pipeline (torch keeps them whole).
    """
    space = space or Space()
    devices = cluster.num_devices
    for tensor in divisors(devices):
        has_dense = model.num_experts == 1 or model.dense_layers > 0
        if tensor > cluster.tiers[0].reach or model.key_heads % tensor or (has_dense and model.inner % tensor):
            continue
        for context in _contexts(model, devices // tensor, space):
            for pipeline in divisors(devices // tensor // context):
                data = devices // (tensor * context * pipeline)
                divides_layers = model.layers % pipeline == 0 or model.layers >= _UNEVEN * pipeline
                if global_batch % data == 0 and divides_layers:
                    yield from _variants(model, cluster, (tensor, context, pipeline, data), global_batch, space)


def _contexts(model: ModelShape, most: int, space: Space) -> list[int]:
    is_long = model.seq >= LONG_TOKENS or space.context_of_any_length
    return [
        c
        for c in divisors(most)
        if c == 1
        or (is_long and model.seq % c == 0 and (model.seq // c >= _PIECE_TOKENS or space.context_of_any_length))
    ]


def _variants(
    model: ModelShape, cluster: Cluster, shape: tuple[int, int, int, int], global_batch: int, space: Space
) -> Iterator[Layout]:
    tensor, context, pipeline, data = shape
    for samples in _MICRO_BATCHES:
        if global_batch % (data * samples):
            continue
        micro_batches = global_batch // (data * samples)
        divisions = product(
            _staged(model, pipeline, micro_batches, space),
            _shards(cluster, shape, space),
            _experts(model, tensor, data),
            space.recomputing,
        )
        for (schedule, chunks, ends), (shard, shard_ranks, compression), (expert, expert_tensor), again in divisions:
            yield Layout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                expert=expert,
                expert_tensor=expert_tensor,
                micro_batch=samples,
                global_batch=global_batch,
                schedule=schedule,
                chunks=chunks,
                recompute=again.kind,
                recomputed=again.parts,
                recompute_layers=_layers_again(model, again, pipeline, schedule, chunks),
                counts_ends=ends,
                shard=shard,
                shard_ranks=shard_ranks,
                is_sequence_parallel=tensor > 1,
                offload=space.offload,
                offload_to=space.offload_to,
                compression=compression,
            )


def _layers_again(model: ModelShape, again: Recomputing, stages: int, schedule: ScheduleKind, chunks: int) -> int:
    """Layers of each part of a stage that are computed again; 0 for all."""
    if again.share == 1.0:
        return 0
    parts = stages * (2 if schedule in FOLDED else chunks)
    return max(1, round(again.share * -(-model.layers // parts)))


def _staged(model: ModelShape, stages: int, micro_batches: int, space: Space) -> list[tuple[ScheduleKind, int, bool]]:
    """Schedules (kind, chunks), and whether embedding and output layer count as a layer each."""
    known = space.schedules or get_args(ScheduleKind)
    found = [(kind, chunks, False) for kind, chunks in schedules(model, stages, micro_batches) if kind in known]
    if not space.counts_ends or stages == 1 or micro_batches < stages:
        return found
    if (model.layers + 2) % stages == 0:
        found.append(("1f1b", 1, True))
    if micro_batches % stages == 0 and "interleaved" in known:
        whole = {chunks for kind, chunks, _ in found if kind == "interleaved"}
        found += [
            ("interleaved", v, False) for v in _MANY_CHUNKS if v not in whole and model.layers % (stages * v) == 0
        ]
        found += [("interleaved", v, True) for v in _MANY_CHUNKS if (model.layers + 2) % (stages * v) == 0]
    return found


def schedules(model: ModelShape, stages: int, micro_batches: int) -> list[tuple[ScheduleKind, int]]:
    """Schedules (kind, chunks) that torch runs with so many stages and micro-batches."""
    if stages == 1:
        return [("1f1b", 1)]
    if micro_batches < stages:
        return [("gpipe", 1)]
    found: list[tuple[ScheduleKind, int]] = [("1f1b", 1)]
    if micro_batches % stages == 0:
        found += [("interleaved", v) for v in _CHUNKS if model.layers % (stages * v) == 0]
        found += [("zero-bubble", v) for v in (1, 2) if model.layers % (stages * v) == 0]
    if model.layers >= 2 * stages:
        found.append(("zbv", 1))
        if micro_batches >= 2 * stages:
            found.append(("dualpipev", 1))
    return found


def _shards(
    cluster: Cluster, shape: tuple[int, int, int, int], space: Space
) -> list[tuple[Literal[0, 1, 2, 3], int, Compression]]:
    """Ways to shard: (what is sharded, among how many, what is compressed). Weights are shared by all, or by those of a
    node alone.
    """
    tensor, context, pipeline, data = shape
    few = data * context < _SIGN_RANKS
    can_compress = data > 1 and tensor == pipeline == 1  # as the executor does, of replicated models
    compressed = [(0, 0, kind) for kind in space.compressions if few or kind != "sign"] if can_compress else []
    if data * context == 1:
        return [(0, 0, "none")]
    if pipeline > 1:
        return [(1, 0, "none")]
    found = [(1, 0, "none"), (2, 0, "none"), (3, 0, "none")]
    near = cluster.tiers[0].reach // (tensor * context)
    if 1 < near < data and data % near == 0:
        found.append((3, near, "none"))
    return [*found, *compressed]  # type: ignore[list-item]


def _experts(model: ModelShape, tensor: int, data: int) -> list[tuple[int, int]]:
    """Ways to divide experts: (over how many ranks, on how many ranks each lies; 0 as many as divide tensors). Where tensor ranks
    divide the rest of a layer, whole experts can lie on them, too."""
    if model.num_experts == 1:
        return [(1, 0)]
    found = [(e, 0) for e in divisors(data) if model.num_experts % e == 0 and model.expert_inner % tensor == 0]
    if tensor > 1:
        found += [(e, 1) for e in divisors(tensor * data) if e % tensor == 0 and model.num_experts % e == 0]
    return found


def divisors(number: int) -> list[int]:
    """All divisors, from 1 to the number itself."""
    return [d for d in range(1, number + 1) if number % d == 0]
