"""What a layout takes of each stage's device: weights, gradients, the optimizer's state, activations, logits, buffers.

How many micro-batches a stage holds at once is read from the schedule. A micro-batch is held until its
backward, or until its gradients of weights, where these are made apart.

Under a pipeline torch keeps a stage's weights gathered and its gradients whole from the first micro-batch to the last, whatever
is sharded between steps (pipelining/stage.py: no reshard after a backward, gradients are scattered by `perform_reduce_grad`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from flatout.core.records.scale import Layout, ModelShape, ScheduleKind, Software, StageMemory
from flatout.machine.cost.schedules import actions_of, chunks_of_stages, layers_of_chunks, schedule_table
from flatout.scale.activations import IMBALANCE, activation_bytes, again_bytes, layer_share
from flatout.scale.sizes import (
    LayerKind,
    WeightPart,
    device_parameters,
    extra_kinds,
    kinds_between,
    layer_parameters,
    layer_spans,
    num_parameters,
    number_bytes,
    sharded_parameters,
    stage_parameters,
    usual_kind,
    weight_parts,
)

_GATHERED_LAYERS: Final = 2
"""Layers whose weights are whole at a time when they are sharded or offloaded: the one that computes, and the next, under way."""
_LIBRARIES: Final = int(1.5 * 2**30)
"""The driver's context, kernels, cuBLAS's and NCCL's buffers: 1 to 1.5 GiB on a data-centre GPU."""
_FRAGMENTS: Final = 0.06
"""Of activations and logits, which come and go in all sizes, what an allocator cannot use (measured: 2 to 6 %)."""
_UNCOUNTED: Final = 0.03
"""Of all tensors, norms and small ones that come and go (two H200s: of 60 layouts none took more above its count, of 30 of models
of four layers one, by 7 %)."""


def memory_of(
    model: ModelShape, layout: Layout, software: Software, *, imbalance: float = IMBALANCE
) -> tuple[StageMemory, ...]:
    """Bytes at the peak on one device of each stage. `slack_bytes` makes it an upper bound for what is counted here.

    >>> gpt3 = ModelShape(hidden=12288, layers=96, heads=96, vocab=50257, seq=2048)
    >>> one = memory_of(gpt3, Layout(), Software())[0]
    >>> round((one.weight_bytes + one.gradient_bytes + one.state_bytes) / 1e12, 1)  # 16 bytes a parameter
    2.8
    """
    spans = layer_spans(model, layout)
    layers = [last - first for first, last in spans]
    stages = chunks_of_stages(layout.schedule, stages=layout.pipeline, parts=layout.parts_per_stage)
    flights = _flights(layout, model.layers)
    last = len(layers) - 1
    of_stages = stage_parameters(model, layout)
    found = []
    for chunks, flight, (dense, experts) in zip(stages, flights, of_stages, strict=True):
        kinds = [one for chunk in chunks for one in kinds_between(model, *spans[chunk])]
        number = sum(count for _, count in kinds)
        of_kinds = (
            count * activation_bytes(model, layout, software, kind, imbalance=imbalance) for kind, count in kinds
        )
        saved = sum(of_kinds) / max(1, number)
        saved *= 1 - (layer_share(model, layout, layout.offload_layers) if layout.offload_layers else 0.0)
        further = 0.0
        if last in chunks and model.extra_tokens:  # what predicts further tokens is with the last layer
            further = model.extra_tokens * sum(
                activation_bytes(model, layout, software, kind, imbalance=imbalance) for kind in extra_kinds(model)
            )
        present = [kind for kind, _ in kinds] or [usual_kind(model)]
        largest = max(present, key=lambda kind: sum(layer_parameters(model, kind)))
        found.append(
            _of_stage(
                model,
                layout,
                software,
                _StageShape(number, 0 in chunks, last in chunks, dense, experts, largest),
                activations=flight * saved + further,
                again=max(again_bytes(model, layout, software, kind, imbalance=imbalance) for kind in present),
                are_all_in_flight=flight >= layout.num_micro_batches * sum(layers[c] for c in chunks),
            )
        )
    return tuple(found)


def in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches times chunks whose activations a stage holds at once, at most, by its schedule."""
    return _flights(layout, layout.pipeline * layout.parts_per_stage)[stage]


def with_slack(peak_bytes: int) -> int:
    """What a device must have for so many bytes of tensors: libraries, and what an allocator cannot use, besides."""
    return with_libraries(peak_bytes) + int(_FRAGMENTS * peak_bytes)


def with_libraries(peak_bytes: int) -> int:
    """The same without what an allocator cannot use."""
    return peak_bytes + _LIBRARIES


# -- what a schedule holds ------------------------------------------------------------------------------------------------


def _flights(layout: Layout, layers: int) -> tuple[int, ...]:
    """Micro-batches times layers that each stage holds at most. A schedule's middle only repeats itself: it is cut short."""
    micro, stages, chunks = layout.num_micro_batches, layout.pipeline, layout.chunks
    if stages == 1 and layout.schedule not in ("gpipe", "looped-bfs"):
        return (layers,)
    few = min(micro, 4 * stages * chunks)
    if layout.schedule in ("gpipe", "looped-bfs") or micro % stages:
        few = micro
    return _live_layers(
        layout.schedule, stages, max(stages, few) if few < micro else micro, layout.parts_per_stage, layers
    )


@lru_cache(maxsize=4096)
def _live_layers(kind: ScheduleKind, stages: int, micro_batches: int, parts: int, layers: int) -> tuple[int, ...]:
    of_chunks = layers_of_chunks(layers, stages * parts)
    found = []
    for row in schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=parts):
        split = {(a.chunk, a.micro_batch) for entry in row for a in actions_of(entry) if a.kind == "W"}
        num_live = most = 0
        for entry in row:
            for kind_, chunk, micro_batch in actions_of(entry):
                if kind_ == "F":
                    num_live += of_chunks[chunk]
                elif kind_ == "W" or (chunk, micro_batch) not in split:
                    num_live -= of_chunks[chunk]
                most = max(most, num_live)
        found.append(most)
    return tuple(found)


# -- a stage --------------------------------------------------------------------------------------------------------------


class _StageShape(NamedTuple):
    """So many layers with so many parameters, without experts and of experts; the kind of its largest layer."""

    layers: int
    is_first: bool
    is_last: bool
    dense: int
    experts: int
    largest: LayerKind


def _of_stage(
    model: ModelShape,
    layout: Layout,
    software: Software,
    stage: _StageShape,
    *,
    activations: float,
    again: float,
    are_all_in_flight: bool,
) -> StageMemory:
    of_embedding = num_parameters(model)[1]
    embeddings = int(stage.is_first) + int(stage.is_last and not (stage.is_first and model.is_tied))
    parts = weight_parts(stage.dense + of_embedding * embeddings, stage.experts, layout)
    unit = weight_parts(*layer_parameters(model, stage.largest), layout)
    ends = device_parameters(weight_parts(of_embedding if embeddings else 0, 0, layout))
    logits = _logits(model, layout, software) if stage.is_last else 0.0
    passing = activations + again + logits
    host = uncounted = 0.0
    if software.shards_by == "weight" and layout.offload == "none":  # what is offloaded is counted alike for all
        both_ends = weight_parts(of_embedding * embeddings, 0, layout)
        load = _StageLoad(parts, unit, both_ends, activations, again, logits, are_all_in_flight)
        peak = _shard_peak(layout, software, load)
        uncounted = _UNCOUNTED * sum(peak)
        peak = peak._replace(buffers=peak.buffers + _received(model, layout, software, stage))
    else:
        weights, gradients, state = _model_bytes(layout, software, parts)
        buffers = 0.0
        if layout.shard == 3 and layout.pipeline == 1:
            buffers = device_parameters(unit) * (_GATHERED_LAYERS * number_bytes(software) + software.gradient_bytes)
            buffers += ends * (number_bytes(software) + software.gradient_bytes)
        if layout.offload == "state":  # it comes in for the update, when activations are gone
            host, state = state, max(0.0, state - passing)
        elif layout.offload == "weights":
            host = weights + gradients + state
            largest = max(device_parameters(unit), ends)
            buffers = _GATHERED_LAYERS * largest * (number_bytes(software) + software.gradient_bytes)
            weights = gradients = 0.0
            share = sharded_parameters(unit, layout) / device_parameters(unit) if layout.shard else 1.0
            state = max(0.0, largest * share * software.state_bytes - passing)
        peak = _Peak(weights, gradients, state, activations + again, logits, buffers)
    return StageMemory(
        weight_bytes=int(peak.weights),
        gradient_bytes=int(peak.gradients),
        state_bytes=int(peak.state),
        activation_bytes=int(peak.activations),
        logits_bytes=int(peak.logits),
        buffer_bytes=int(peak.buffers),
        slack_bytes=_LIBRARIES + int(_FRAGMENTS * passing + uncounted),
        feedback_bytes=int(_feedback(layout, parts)),
        host_bytes=int(host),
    )


def _received(model: ModelShape, layout: Layout, software: Software, stage: _StageShape) -> float:
    """Bytes of torch's stages, which have a tensor for what each micro-batch brings from the stage before, and from the
    one behind.
    """
    tokens = layout.micro_batch * model.seq // layout.context // (layout.tensor if layout.is_sequence_parallel else 1)
    neighbours = 2 * layout.parts_per_stage - stage.is_first - stage.is_last
    return neighbours * layout.num_micro_batches * tokens * model.hidden * number_bytes(software)


def _model_bytes(layout: Layout, software: Software, parts: tuple[WeightPart, ...]) -> tuple[float, float, float]:
    """Bytes of weights, gradients and the optimizer's state while micro-batches go through."""
    own, share = device_parameters(parts), sharded_parameters(parts, layout)
    is_whole = layout.pipeline > 1
    return (
        (share if layout.shard == 3 and not is_whole else own) * number_bytes(software),
        (share if layout.shard >= 2 and not is_whole else own) * software.gradient_bytes * software.trained_share,
        (share if layout.shard else own) * software.state_bytes * software.trained_share,
    )


def _feedback(layout: Layout, parts: tuple[WeightPart, ...]) -> float:
    """What compression leaves out and adds the next time, in float32; who adds a part in half precision has its own besides."""
    ranks = layout.data * layout.context
    copies = {"none": 0.0, "bfloat16": 1 + 1 / ranks, "powersgd": 1.0, "sign": 1.0}[layout.compression]
    return 4 * copies * device_parameters(parts)


class _Peak(NamedTuple):
    """Bytes on one device at the peak."""

    weights: float
    gradients: float
    state: float
    activations: float
    logits: float
    buffers: float


class _StageLoad(NamedTuple):
    """What one stage holds: all its weights `own`, of which one layer has `unit` and embedding and head `ends`; and bytes of what
    micro-batches bring.

    `again` are the activations of a layer that is recomputed. `are_all_in_flight`: all micro-batches go forward before one goes
    backward, so that there are no gradients yet when activations take most.
    """

    own: tuple[WeightPart, ...]
    unit: tuple[WeightPart, ...]
    ends: tuple[WeightPart, ...]
    activations: float
    again: float
    logits: float
    are_all_in_flight: bool


def _shard_peak(layout: Layout, software: Software, stage: _StageLoad) -> _Peak:
    """Bytes of a stage when it holds the most, where each weight is sharded by itself, as FSDP2 does (torch.distributed.fsdp).

    Between steps there are shards in float32 with the optimizer's state. A block's weights are gathered in half precision; its
    gradients are made in half precision, put into float32, reduced, and added to the shards' gradients, while the next block's
    are made. Weights outside of blocks (embedding, head) are one group, whose gradients are reduced last. In the last backward
    a block lets go of its gathered weights as it gets its gradients, so that the peak is at the beginning of the last backward
    or at its end.
    """
    half, full = number_bytes(software), software.gradient_bytes * software.trained_share

    def share(parts: tuple[WeightPart, ...]) -> float:
        return sharded_parameters(parts, layout) if layout.shard else device_parameters(parts)

    own, unit, ends = (device_parameters(parts) for parts in (stage.own, stage.unit, stage.ends))
    is_staged, num = layout.pipeline > 1, layout.num_micro_batches
    is_gathered_again = layout.shard == 3 and not is_staged
    is_whole = layout.shard < 2 or is_staged
    gradients = (own if is_whole else share(stage.own)) * full
    weights = (ends if is_gathered_again else own) * half
    # of the block that computes and of the next; none at the loss
    gathering = 2 * unit * half if is_gathered_again else 0.0
    # a block's gradients; as they are reduced, too, with the shards' and the next block's
    reducing = unit * (2 * half + full) + share(stage.unit) * full
    making = gathering + (unit * half if is_whole and num > 1 else reducing)
    state = share(stage.own) * software.state_bytes * software.trained_share
    rest = max(0.0, stage.again + making - stage.logits) + ends * half
    peaks = []
    if num == 1 or stage.are_all_in_flight:
        peaks.append(_Peak(weights, 0.0, state, stage.activations, stage.logits, rest))
    if num > 1:
        live = stage.activations * (num - 1) / num if stage.are_all_in_flight else stage.activations
        peaks.append(_Peak(weights, gradients, state, live, stage.logits, rest))
    else:
        done = share(stage.own) - share(stage.ends)
        peaks.append(_Peak(ends * half, done * full, state, 0.0, 0.0, ends * (half + full)))
        gathered, left = ends * half + unit * half, (done - share(stage.unit)) * full
        peaks.append(_Peak(gathered, left, state, 0.0, 0.0, ends * half + stage.again + reducing))
    return max(peaks, key=sum)


# -- activations ----------------------------------------------------------------------------------------------------------


def _logits(model: ModelShape, layout: Layout, software: Software) -> float:
    """Bytes of the logits, and of their float32 for the loss and its gradient."""
    columns = -(-model.vocab // layout.tensor)
    of_loss = software.loss_bytes
    if layout.tensor > 1 and software.divided_by == "tensors":
        of_loss += 4  # DTensor's loss over divided classes has one more
    return layout.micro_batch * model.seq // layout.context * columns * (number_bytes(software) + of_loss)
