"""How many numbers a transformer's layers have, and how many of them a device of a layout has."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from flatout.core.records.scale import Layout, ModelShape, Software
from flatout.machine.cost.schedules import chunks_of_stages, layers_of_chunks


def number_bytes(software: Software) -> int:
    """Bytes of a weight or an activation: 2, also where products are made in 8 bits, or 4 in single precision."""
    return 4 if software.dtype in ("float32", "tf32") else 2


class LayerKind(NamedTuple):
    """What layers of one model differ in: whether the feed-forward is of experts, and how many tokens attention sees at most."""

    is_sparse: bool
    visible: int


@lru_cache(maxsize=256)
def layer_kinds(model: ModelShape) -> tuple[LayerKind, ...]:
    """The kind of each layer, from the first to the last.

    >>> shape = ModelShape(hidden=8, layers=3, heads=1, vocab=9, seq=64, num_experts=4, dense_layers=1, window=16, full_every=3)
    >>> [tuple(kind) for kind in layer_kinds(shape)]
    [(False, 16), (True, 16), (True, 64)]
    """
    return tuple(
        LayerKind(
            model.num_experts > 1 and number >= model.dense_layers,
            min(model.seq, model.window) if _is_windowed(model, number) else model.seq,
        )
        for number in range(model.layers)
    )


def _is_windowed(model: ModelShape, number: int) -> bool:
    return bool(model.window) and not (model.full_every and (number + 1) % model.full_every == 0)


@lru_cache(maxsize=1 << 14)
def kinds_between(model: ModelShape, first: int, last: int) -> tuple[tuple[LayerKind, int], ...]:
    """Kinds of layers from one number to before another, and how many there are of each."""
    return tuple(Counter(layer_kinds(model)[first:last]).items())


@lru_cache(maxsize=1 << 13)
def layer_spans(model: ModelShape, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Numbers of the first layer of each part of the stages and of that after its last, by the order in which data pass them.

    >>> shape = ModelShape(hidden=8, layers=6, heads=1, vocab=9, seq=1)
    >>> layer_spans(shape, Layout(pipeline=2)), layer_spans(shape, Layout(pipeline=2, counts_ends=True))
    (((0, 3), (3, 6)), ((0, 3), (3, 6)))
    """
    parts = layout.pipeline * layout.parts_per_stage
    if layout.counts_ends and parts > 1:
        numbers = list(layers_of_chunks(model.layers + 2, parts))
        numbers[0] -= 1
        numbers[-1] -= 1
    else:
        numbers = list(layers_of_chunks(model.layers, parts))
    ends = list(accumulate(numbers))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@lru_cache(maxsize=1 << 13)
def stage_parameters(model: ModelShape, layout: Layout) -> tuple[tuple[int, int], ...]:
    """Parameters (without experts, of experts) of the layers of each stage, without embedding and output layer."""
    spans = layer_spans(model, layout)
    found = []
    for chunks in chunks_of_stages(layout.schedule, stages=layout.pipeline, parts=layout.parts_per_stage):
        total = [0, 0]
        for chunk in chunks:
            for kind, number in kinds_between(model, *spans[chunk]):
                dense, experts = layer_parameters(model, kind)
                total = [total[0] + number * dense, total[1] + number * experts]
            if chunk == len(spans) - 1:
                dense, experts = extra_parameters(model)
                total = [total[0] + dense, total[1] + experts]
        found.append((total[0], total[1]))
    return tuple(found)


@lru_cache(maxsize=256)
def usual_kind(model: ModelShape) -> LayerKind:
    """The kind that most layers have."""
    return Counter(layer_kinds(model)).most_common(1)[0][0]


@lru_cache(maxsize=256)
def num_parameters(model: ModelShape) -> tuple[int, int]:
    """Parameters (of all layers, of one embedding), norms and biases left out: they are a thousandth.

    >>> num_parameters(ModelShape(hidden=1024, layers=24, heads=16, vocab=50257, seq=1024))
    (301989888, 51463168)
    """
    of_layers = sum(sum(layer_parameters(model, kind)) for kind in layer_kinds(model))
    return of_layers + sum(extra_parameters(model)), model.vocab * model.hidden


@lru_cache(maxsize=1024)
def layer_parameters(model: ModelShape, kind: LayerKind) -> tuple[int, int]:
    """Parameters (of one layer without its experts, of its experts): a single feed-forward is no expert, and shared ones are
    none.

    >>> shape = ModelShape(hidden=8, layers=1, heads=1, vocab=9, seq=1, num_experts=4)
    >>> layer_parameters(shape, layer_kinds(shape)[0])
    (288, 2048)
    """
    attention = _num(attention_matrices(model, 1))
    if not kind.is_sparse:
        return attention + _num(feed_matrices(model, model.inner, 1)), 0
    one = _num(feed_matrices(model, model.expert_inner, 1))
    router = model.hidden * model.num_experts
    return attention + router + one * model.shared_experts, one * model.num_experts


def extra_parameters(model: ModelShape) -> tuple[int, int]:
    """The same of what predicts further tokens; its embedding and output layer are the model's own."""
    dense, experts = layer_parameters(model, layer_kinds(model)[-1])
    return model.extra_tokens * (dense + 2 * model.hidden**2), model.extra_tokens * experts


@lru_cache(maxsize=256)
def active_parameters(model: ModelShape) -> int:
    """Parameters of all layers that a token meets: of experts those that it takes."""
    of_experts = model.experts_per_token / model.num_experts
    total = 0.0
    for kind in layer_kinds(model):
        dense, experts = layer_parameters(model, kind)
        total += dense + experts * of_experts
    dense, experts = extra_parameters(model)
    return round(total + dense + experts * of_experts)


Matrices = tuple[tuple[int, int], ...]
"""Sizes of weights: columns of the result, depth."""


def _num(matrices: Matrices) -> int:
    return sum(n * k for n, k in matrices)


def attention_matrices(model: ModelShape, ranks: int) -> Matrices:
    """Weights of attention on one of `ranks`; those that make latent vectors are on each."""
    hidden, heads, own = model.hidden, model.heads // ranks, model.head_width
    out = (hidden, model.heads * own // ranks)
    if not model.key_rank:
        keys = model.key_heads * own
        return ((model.heads * own + 2 * keys) // ranks, hidden), out
    queries = (
        ((model.query_rank, hidden), (heads * model.query_width, model.query_rank))
        if model.query_rank
        else ((heads * model.query_width, hidden),)
    )
    return *queries, (model.key_rank + model.rope_dim, hidden), (heads * 2 * own, model.key_rank), out


def feed_matrices(model: ModelShape, inner: int, ranks: int) -> Matrices:
    """Weights of one feed-forward of that width on one of `ranks`."""
    up = (inner // ranks, model.hidden)
    return up, (model.hidden, inner // ranks), *((up,) if model.is_gated else ())


def num_weights(model: ModelShape, kind: LayerKind) -> int:
    """Number of tensors of one layer, where each product has its own: those of q, k and v are apart, and there are two norms.

    >>> shape = ModelShape(hidden=8, layers=1, heads=1, vocab=9, seq=1)
    >>> num_weights(shape, layer_kinds(shape)[0])
    8
    """
    feed = len(feed_matrices(model, model.inner, 1))
    feeds = feed + feed * (model.shared_experts > 0) + 1 if kind.is_sparse else feed
    return len(attention_matrices(model, 1)) + (0 if model.key_rank else 2) + feeds + 2


def factor_parameters(model: ModelShape, ranks: int, kind: LayerKind, *, rank: int) -> tuple[int, int]:
    """Parameters as in `layer_parameters`, but of factors (m, rank) and (rank, n) of each matrix, as it lies on one of
    `ranks`, times these.
    """

    def factors(matrices: Matrices) -> int:
        return rank * ranks * sum(n + k for n, k in matrices)

    attention = factors(attention_matrices(model, ranks))
    if not kind.is_sparse:
        return attention + factors(feed_matrices(model, model.inner, ranks)), 0
    one = factors(feed_matrices(model, model.expert_inner, ranks))
    return attention + one * model.shared_experts, one * model.num_experts


class WeightPart(NamedTuple):
    """Parameters of one device, and how many of the ranks that share weights hold different ones: 1, or those that divide the
    experts (less than 1 where tensor ranks, too, hold whole experts)."""

    numbers: float
    expert: float


def weight_parts(dense: float, experts: float, layout: Layout) -> tuple[WeightPart, ...]:
    """Parts of so many parameters that a device of the layout holds before data ranks shard them."""
    if layout.expert == 1 and layout.expert_ranks == layout.tensor:
        return (WeightPart((dense + experts) / layout.tensor, 1),)
    different = layout.expert * layout.expert_ranks / layout.tensor
    both = (
        WeightPart(dense / layout.tensor, 1),
        WeightPart(experts / layout.expert / layout.expert_ranks, different),
    )
    return tuple(part for part in both if part.numbers)


def sharded_parameters(parts: tuple[WeightPart, ...], layout: Layout) -> float:
    """Parameters of one device, when those ranks that hold the same divide them."""
    return sum(part.numbers / max(1, int(layout.sharing / part.expert)) for part in parts)


def device_parameters(parts: tuple[WeightPart, ...]) -> float:
    """Parameters that one device holds."""
    return sum(part.numbers for part in parts)
