"""How many numbers a model's layers have, and how many of them a device of a layout has."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from flatout.core.records.scale import Layout, ModelShape, Software
from flatout.machine.cost.schedules import chunks_of_stages, layers_of_chunks


def number_bytes(software: Software) -> int:
    """Bytes of a weight or an activation: 2, also where products are made in 8 bits, or 4 in single precision."""
    return 4 if software.dtype in ("float32", "tf32") else 2


Mixer = Literal["attention", "state", "none"]
"""What a layer mixes tokens with."""
Feed = Literal["dense", "experts", "none"]
_OF_LETTERS: Final[dict[str, tuple[Mixer, Feed]]] = {
    "M": ("state", "none"),
    "*": ("attention", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}


class LayerKind(NamedTuple):
    """What layers of one model differ in: what mixes tokens, the feed-forward, how many tokens attention sees at most (0 where
    there is none), and how many keys become one besides (0: none do)."""

    mixer: Mixer
    feed: Feed
    visible: int
    ratio: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether the feed-forward is of experts."""
        return self.feed == "experts"

    @property
    def blocks(self) -> int:
        """What has a norm and is added to the residual: the mixer, the feed-forward."""
        return (self.mixer != "none") + (self.feed != "none")


@lru_cache(maxsize=256)
def layer_kinds(model: ModelShape) -> tuple[LayerKind, ...]:
    """The kind of each layer, from the first to the last.

    >>> shape = ModelShape(hidden=8, layers=3, heads=1, vocab=9, seq=64, num_experts=4, dense_layers=1, window=16, full_every=3)
    >>> [tuple(kind) for kind in layer_kinds(shape)]
    [('attention', 'dense', 16, 0), ('attention', 'experts', 16, 0), ('attention', 'experts', 64, 0)]
    """
    if model.pattern:
        return _kinds_of(model, model.pattern)
    return tuple(
        LayerKind(
            "attention",
            "experts" if model.num_experts > 1 and number >= model.dense_layers else "dense",
            _visible(model, number),
            model.compressed.ratios[number] if model.compressed else 0,
        )
        for number in range(model.layers)
    )


@lru_cache(maxsize=256)
def extra_kinds(model: ModelShape) -> tuple[LayerKind, ...]:
    """The kinds of the layers that predict one further token."""
    if model.extra_pattern:
        return _kinds_of(model, model.extra_pattern)
    return layer_kinds(model)[-1:]


def _kinds_of(model: ModelShape, pattern: str) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(*_OF_LETTERS[letter], model.seq if letter == "*" else 0) for letter in pattern)


def _visible(model: ModelShape, number: int) -> int:
    return min(model.seq, model.window) if _is_windowed(model, number) else model.seq


def compressed_visible(model: ModelShape, kind: LayerKind) -> float:
    """Compressed keys that a query attends to in the mean, under a causal mask."""
    if not kind.ratio or model.compressed is None:
        return 0.0
    all_of_them = model.seq / kind.ratio / 2
    return min(model.compressed.selected, all_of_them) if kind.ratio in model.compressed.indexed else all_of_them


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
    mixer = _num(mixer_matrices(model, kind, 1)) + _convolved(model, kind)
    if not kind.is_sparse:
        return mixer + (_num(feed_matrices(model, model.inner, 1)) if kind.feed == "dense" else 0), 0
    router = model.hidden * model.num_experts
    return mixer + router + _num(shared_matrices(model, 1)), model.num_experts * _num(expert_matrices(model, 1))


def extra_parameters(model: ModelShape) -> tuple[int, int]:
    """The same of what predicts further tokens; its embedding and output layer are the model's own."""
    both = [layer_parameters(model, kind) for kind in extra_kinds(model)]
    dense, experts = (sum(numbers) for numbers in zip(*both, strict=True))
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
    out: Matrices = ((hidden, model.heads * own // ranks),)
    if model.out_rank:  # each group's own matrix, as if one below the other
        numbers = model.out_groups * model.out_rank
        out = (numbers // ranks, model.heads * own // model.out_groups), (hidden, numbers // ranks)
    keys = (1 if model.shares_keys else 2) * model.key_heads * own
    if not model.key_rank and not model.query_rank:
        return ((model.heads * own + keys) // ranks, hidden), *out
    queries = (
        ((model.query_rank, hidden), (heads * model.query_width, model.query_rank))
        if model.query_rank
        else ((heads * model.query_width, hidden),)
    )
    if not model.key_rank:
        return *queries, (keys // ranks, hidden), *out
    return *queries, (model.key_rank + model.rope_dim, hidden), (heads * 2 * own, model.key_rank), *out


def mixer_matrices(model: ModelShape, kind: LayerKind, ranks: int) -> Matrices:
    """Weights of what mixes tokens in a layer, on one of `ranks`; those that compress keys are on each.

    A state-space mixer has one matrix for its gate, channels, what goes into states and out of them, and steps, and one behind
    (Mamba-2, section 6). Keys are compressed by a weighted mean: weights and keys are products, twice as wide where means
    overlap, as those do that an indexer chooses from (DeepSeek-V4's model.py, Compressor and Indexer)."""
    if kind.mixer == "none":
        return ()
    if kind.mixer == "state":
        state = model.state
        assert state is not None
        numbers = 2 * state.inner + 2 * state.groups * state.size + state.heads
        return (numbers // ranks, model.hidden), (model.hidden, state.inner // ranks)
    found = attention_matrices(model, ranks)
    if not kind.ratio or model.compressed is None:
        return found
    keys = model.compressed
    is_indexed = kind.ratio in keys.indexed
    widths = [(1 + is_indexed) * model.head_width] * 2
    if is_indexed:
        widths += [2 * keys.index_dim] * 2 + [keys.index_heads]
    index = ((keys.index_heads * keys.index_dim, model.query_rank or model.hidden),) if is_indexed else ()
    return *found, *((width, model.hidden) for width in widths), *index


def _convolved(model: ModelShape, kind: LayerKind) -> int:
    """Parameters of a state-space mixer's convolution, of each channel by itself."""
    if kind.mixer != "state" or model.state is None:
        return 0
    return model.state.conv * (model.state.inner + 2 * model.state.groups * model.state.size)


def feed_matrices(model: ModelShape, inner: int, ranks: int, *, hidden: int = 0) -> Matrices:
    """Weights of one feed-forward of that width on one of `ranks`, for vectors of `hidden` numbers (0: the model's)."""
    outer = hidden or model.hidden
    up = (inner // ranks, outer)
    return up, (outer, inner // ranks), *((up,) if model.is_gated else ())


def expert_matrices(model: ModelShape, ranks: int) -> Matrices:
    """Weights of one expert on one of `ranks`."""
    return feed_matrices(model, model.expert_inner, ranks, hidden=model.expert_width)


def shared_matrices(model: ModelShape, ranks: int) -> Matrices:
    """Weights of what all tokens take in a layer of experts: shared experts, and what makes vectors for the others shorter and
    long again, which is on each rank."""
    shorter = ((model.expert_width, model.hidden), (model.hidden, model.expert_width)) if model.expert_hidden else ()
    return *(feed_matrices(model, model.shared_inner, ranks) if model.shared_inner else ()), *shorter


def num_weights(model: ModelShape, kind: LayerKind) -> int:
    """Number of tensors of one layer, where each product has its own: those of q, k and v are apart, and each block has a norm.

    >>> shape = ModelShape(hidden=8, layers=1, heads=1, vocab=9, seq=1)
    >>> num_weights(shape, layer_kinds(shape)[0])
    8
    """
    found = len(mixer_matrices(model, kind, 1)) + kind.blocks
    if kind.mixer == "attention":
        found += 0 if model.key_rank or model.query_rank else 2
    elif kind.mixer == "state":
        found += 6  # the convolution's and its bias, steps' bias, decay, skip, and the norm behind states
    if kind.feed == "dense":
        found += len(feed_matrices(model, model.inner, 1))
    elif kind.feed == "experts":
        found += len(expert_matrices(model, 1)) + len(shared_matrices(model, 1)) + 1
    return found


def factor_parameters(model: ModelShape, ranks: int, kind: LayerKind, *, rank: int) -> tuple[int, int]:
    """Parameters as in `layer_parameters`, but of factors (m, rank) and (rank, n) of each matrix, as it lies on one of
    `ranks`, times these.
    """

    def factors(matrices: Matrices) -> int:
        return rank * ranks * sum(n + k for n, k in matrices)

    mixer = factors(mixer_matrices(model, kind, ranks))
    if not kind.is_sparse:
        return mixer + (factors(feed_matrices(model, model.inner, ranks)) if kind.feed == "dense" else 0), 0
    return mixer + factors(shared_matrices(model, ranks)), model.num_experts * factors(expert_matrices(model, ranks))


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
