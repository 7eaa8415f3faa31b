"""What a layout takes of each stage's device: weights, gradients, the optimizer's state, activations, logits, buffers.

Activations are counted tensor by tensor, as Korthikanti et al. (Reducing activation recomputation in large transformer models,
2022, section 4) do; how many micro-batches a stage holds at once is read from the schedule.
"""

from __future__ import annotations

from typing import Final

from flatout.cost.schedules import table_of
from flatout.records.scale import Layout, ModelShape, Software, StageMemory
from flatout.simulate.step import num_parameters

_HALF: Final = 2
_GATHERED_LAYERS: Final = 2
"""Layers whose weights are whole at a time when they are sharded: the one that computes, and the next, which is on its way."""
_LIBRARIES: Final = int(1.5 * 2**30)
"""The driver's context, kernels, cuBLAS's and NCCL's buffers: 1 to 1.5 GiB on a data-centre GPU."""
_FRAGMENTS: Final = 0.06
"""Of activations and logits, which come and go in all sizes, what an allocator cannot use (measured: 2 to 6 %)."""


def memory_of(model: ModelShape, layout: Layout, software: Software) -> tuple[StageMemory, ...]:
    """Bytes at the peak on one device of each stage. `slack_bytes` makes it an upper bound for what is counted here.

    >>> gpt3 = ModelShape(hidden=12288, layers=96, heads=96, vocab=50257, seq=2048)
    >>> one = memory_of(gpt3, Layout(), Software())[0]
    >>> round((one.weight_bytes + one.gradient_bytes + one.state_bytes) / 1e12, 1)  # 16 bytes a parameter
    2.8
    """
    return tuple(_of_stage(model, layout, software, stage) for stage in range(layout.pipeline))


def in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches times chunks whose activations a stage holds at once, at most, by its schedule."""
    few = min(layout.num_micro_batches, 4 * layout.pipeline * layout.chunks)
    few = few if layout.chunks == 1 else max(layout.pipeline, few // layout.pipeline * layout.pipeline)
    kind = layout.schedule
    if kind == "gpipe":
        return layout.num_micro_batches
    held = most = 0
    for action in table_of(kind, stages=layout.pipeline, micro_batches=few, chunks=layout.chunks)[stage]:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def with_slack(peak_bytes: int) -> int:
    """What a device must have for so many bytes of tensors: libraries, and what an allocator cannot use, besides."""
    return peak_bytes + _LIBRARIES + int(_FRAGMENTS * peak_bytes)


def _of_stage(model: ModelShape, layout: Layout, software: Software, stage: int) -> StageMemory:
    of_layer, of_embedding = num_parameters(model)
    layers = -(-model.layers // (layout.pipeline * layout.chunks)) * layout.chunks
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    embeddings = int(is_first) + int(is_last and not (is_first and model.is_tied))
    own = (of_layer * layers + of_embedding * embeddings) / layout.tensor
    data = layout.data
    weights = own * _HALF / (data if layout.shard == 3 else 1)
    gradients = own * software.gradient_bytes / (data if layout.shard >= 2 else 1)
    state = own * software.state_bytes / (data if layout.shard >= 1 else 1)
    buffers = 0.0
    if layout.shard == 3:
        buffers = of_layer / layout.tensor * (_GATHERED_LAYERS * _HALF + software.gradient_bytes)
    held = in_flight(layout, stage) * (layers // layout.chunks)
    activations = held * _of_layer(model, layout, software) + _again(model, layout, software)
    logits = _logits(model, layout) if is_last else 0.0
    return StageMemory(
        weight_bytes=int(weights),
        gradient_bytes=int(gradients),
        state_bytes=int(state),
        activation_bytes=int(activations),
        logits_bytes=int(logits),
        buffer_bytes=int(buffers),
        slack_bytes=_LIBRARIES + int(_FRAGMENTS * (activations + logits)),
    )


def _of_layer(model: ModelShape, layout: Layout, software: Software) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward."""
    if layout.recompute == "full":
        between = layout.tensor if layout.is_sequence_parallel else 1
        return layout.micro_batch * model.seq * model.hidden * _HALF / between
    return _all_of_layer(model, layout, software, scores=layout.recompute == "none")


def _all_of_layer(model: ModelShape, layout: Layout, software: Software, *, scores: bool) -> float:
    """Bytes with nothing recomputed but, without `scores`, attention."""
    tokens, hidden, ranks = layout.micro_batch * model.seq, model.hidden, layout.tensor
    keys = model.key_heads * model.head_width
    between = ranks if layout.is_sequence_parallel else 1
    # inputs of the two norms, of the first products, two masks of dropout
    around = tokens * hidden * (4 * _HALF + 2) / between
    attention = tokens * (2 * hidden + 2 * keys) * _HALF / ranks
    feed = tokens * model.inner * (3 if model.is_gated else 2) * _HALF * model.experts_per_token / ranks
    if not scores or software.attention == "fused":
        return around + attention + feed
    # softmax's result, dropout's result, and its mask
    pairs = layout.micro_batch * model.heads / ranks * model.seq * model.seq
    return around + attention + feed + pairs * (2 * _HALF + 1)


def _again(model: ModelShape, layout: Layout, software: Software) -> float:
    """Bytes of the one layer that is computed again during its backward."""
    if layout.recompute == "none":
        return 0.0
    return _all_of_layer(model, layout, software, scores=True)


def _logits(model: ModelShape, layout: Layout) -> float:
    """In half precision, in float32 for the loss, and their gradient."""
    columns = -(-model.vocab // layout.tensor)
    return layout.micro_batch * model.seq * columns * (_HALF + 4 + 4)
