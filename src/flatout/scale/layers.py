"""What one layer, the head and the embedding take of a device, of its host and of its links, for one micro-batch.

The host starts operators one after the other; a device that is done earlier waits for it. So a layer takes the longer of what its
operators take on the device and what the host takes to start them (Constants.operator_s), and never the sum.
"""

# T tokens of a micro-batch on one rank, H hidden width

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import Layout, Software
from flatout.machine.cost.collectives import all_reduce_s, all_to_all_s, gather_s
from flatout.machine.cost.roofline import bandwidth_bytes_per_s, peak_flop_per_s
from flatout.machine.cost.waves import Rates, product_s
from flatout.machine.specs.catalog import load_spec
from flatout.scale.activations import activation_bytes, layer_share, recomputed_share
from flatout.scale.case import StepCase, rate_dtype
from flatout.scale.links import copies_of, gathered_s, is_sent_by_layer, scattered_s
from flatout.scale.sizes import (
    LayerKind,
    WeightPart,
    attention_matrices,
    compressed_visible,
    device_parameters,
    expert_matrices,
    extra_kinds,
    feed_matrices,
    layer_kinds,
    layer_parameters,
    mixer_matrices,
    num_parameters,
    num_weights,
    sharded_parameters,
    shared_matrices,
    weight_parts,
)

_SOFTMAX_GROUP: Final = 4
"""Megatron's fused softmax takes attention whose samples x heads are a multiple of it (fused_kernels, batches_per_block)."""
_FUSED_BACKWARD: Final = 2.5
"""Times the forward's work: five products, as scores are made again, where the forward has two (the same, section 3.1)."""
_ORDERED: Final = 4 / 3
"""Tokens are read and written when they are put in their experts' order and back; a third, as bytes here count three times."""
_ROUTING_KERNELS: Final = 12
"""Kernels of a router: its product, softmax, the largest, counts and offsets, and the order of tokens there and back."""
_STATE_SHARE: Final = 0.64
"""Of the memory's rate that programs reach, by the bytes of states as they are counted here: 2.6e12 B/s on an H200, where others
reach 4.1e12 (bench/results/2026-11-28-h200/state_space.json, four samples of 8192 tokens)."""
_STATE_BACKWARD: Final = 3.4
"""Times the forward's seconds (the same: 3.2 to 3.8)."""
_STATE_KERNELS: Final = 8
"""Kernels of a forward: the convolution, sums of steps, states of chunks, passing them on, products of pairs, the scan, the
norm."""
_FLOAT: Final = 4
_BLOCK: Final = 128
"""Keys that a kernel of fused attention takes at a time: of a window's ends, half a block on either side is for nothing."""
_BITS: Final[Mapping[str, int]] = {"float8": 8, "mxfp8": 8, "nvfp4": 4}
"""Of a number, in types whose products need a cast."""
_CAST: Final = 5
"""Bytes read and written to make a number of half precision one of 8 bits with a scale of its tensor: read for the largest, read
again, written."""
_CAST_AGAIN: Final = 3
"""The same with the scale known, for the transposed copy that the backward needs."""


class LayerPass(NamedTuple):
    """Seconds of one layer, or of the head, in one direction: of the device without collectives; of the collectives of tensor,
    context and expert ranks that it waits for; of the host; of weights and gradients that are sent meanwhile, and what
    arithmetic loses by that; of copies from and to the host's memory or disk."""

    device_s: float
    tensor_s: float
    host_s: float
    context_s: float = 0.0
    expert_s: float = 0.0
    sent_s: float = 0.0
    slowed_s: float = 0.0
    copied_s: float = 0.0

    @property
    def own_s(self) -> float:
        """What it takes where nothing is sent or copied."""
        return max(self.device_s + self.tensor_s + self.context_s + self.expert_s, self.host_s)

    @property
    def total_s(self) -> float:
        """Seconds that it takes in all."""
        return max(self.own_s, self.sent_s, self.copied_s) + self.slowed_s

    @property
    def sending_s(self) -> float:
        """Seconds that sending adds to it."""
        return max(self.own_s, self.sent_s) - self.own_s + self.slowed_s

    @property
    def copying_s(self) -> float:
        """Seconds that copies add to that."""
        return max(0.0, self.copied_s - max(self.own_s, self.sent_s))

    def __add__(self, other: object) -> LayerPass:
        if not isinstance(other, LayerPass):
            return NotImplemented
        return LayerPass(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> LayerPass:
        """The pass repeated `factor` times."""
        return LayerPass(*(factor * x for x in self))

    def besides(self, *, sent_s: float, copied_s: float, contention: float) -> LayerPass:
        """The pass while so much is sent and copied; arithmetic loses a share of the time that it goes on beside a collective."""
        slowed_s = contention * min(self.device_s, sent_s)
        return self._replace(sent_s=sent_s, copied_s=copied_s, slowed_s=slowed_s)


NOTHING: Final = LayerPass(0.0, 0.0, 0.0)


class LayerWork(NamedTuple):
    """Passes of one layer, the head or the embedding, by the kind of an action: F forward, B backward, or I and W, its
    two parts.
    """

    forward: LayerPass
    backward: LayerPass
    inputs: LayerPass
    weights: LayerPass

    def of(self, kind: str) -> LayerPass:
        """The pass of an action, by its letter."""
        return self["FBIW".index(kind)]


def rates_of(case: StepCase, dtype: str) -> Rates:
    """The rates of the device's data sheet, as far as they are reached."""
    spec, constants = load_spec(case.cluster.device), case.constants
    if spec.num_units is None:
        raise PlanError(f"the data sheet of '{spec.id}' does not say how many multiprocessors it has")
    return Rates(
        flop_per_s=peak_flop_per_s(spec, rate_dtype(dtype)) * constants.product_share,
        bytes_per_s=bandwidth_bytes_per_s(spec) * constants.memory_share,
        num_units=int(spec.num_units.value),
        fill_depth=constants.fill_depth,
        misaligned_share=constants.misaligned_share,
        kernel_s=constants.kernel_s,
    )


def started_s_of(case: StepCase) -> float:
    """Seconds of the host to start an operator on what tensor ranks may have divided."""
    has_divided = case.layout.tensor > 1 and case.software.divided_by == "tensors"
    return case.constants.divided_operator_s if has_divided else case.constants.operator_s


# -- work -----------------------------------------------------------------------------------------------------------------


def layer(case: StepCase, kind: LayerKind) -> LayerWork:
    """One layer on one micro-batch; what is computed again is in the backward, and in its inputs' part."""
    model, layout, _, software, constants = case
    rates, operator_s = rates_of(case, software.dtype), started_s_of(case)
    ranks, width, tokens, hidden = layout.tensor, case.width, case.tokens, model.hidden
    products = _products(case, rates, kind)
    attention = _mixing(case, rates, kind)
    whole_bytes = tokens * hidden * width
    # of each block a norm (read, write), a dropout with the residual (read two, write one and a mask): each rank has all of them
    passes = 6 + (
        3 * model.streams if model.streams > 1 else 0
    )  # streams are read for a block, and read and written behind it
    around = kind.blocks * passes * whole_bytes / (ranks if layout.is_sequence_parallel else 1)
    around += 3 * _between_products(case, kind)
    around *= (model.is_gated and software.gated_traffic) or software.traffic
    around *= software.expert_traffic if kind.is_sparse else 1.0
    num_kernels = 5 * kind.blocks + _ROUTING_KERNELS * kind.is_sparse
    reading_s = (
        around + attention.score_bytes + products.cast_bytes + products.adapter_bytes
    ) / rates.bytes_per_s + num_kernels * rates.kernel_s
    back_bytes = 1.3 * around + 1.4 * attention.score_bytes + products.back_cast_bytes + products.back_adapter_bytes
    back_reading_s = back_bytes / rates.bytes_per_s
    back_reading_s += (num_kernels + kind.blocks) * rates.kernel_s
    reduce_s = all_reduce_s(whole_bytes, ranks, case.tiers)
    # tokens stay divided among tensor ranks that hold whole experts
    tensor_s = (kind.blocks - (kind.is_sparse and layout.expert_ranks < ranks)) * reduce_s
    tensor_back_s = tensor_s
    if software.tensor_hidden and ranks > 1:
        tensor_s, tensor_back_s = (
            tensor_s - min(software.tensor_hidden * tensor_s * (1 - 1 / ranks), beside_s)
            for beside_s in (products.forward_s, products.inputs_s + products.weights_s)
        )
    around_s, around_back_s = _around(case, attention) if kind.mixer == "attention" else (0.0, 0.0)
    expert_s = _routed(case) if kind.is_sparse else 0.0
    started_s = (0 if attention.is_fused else software.unfused_softmax_operators) * operator_s
    of_experts_s = 0.0
    if kind.is_sparse:
        started_s += software.routing_operators * operator_s
        of_experts_s = software.expert_operators * max(1, model.num_experts // layout.expert) * operator_s
    num_collectives = kind.blocks * (ranks > 1) + (layout.context > 1) + (layout.shard == 3)
    num_collectives += 2 * (layout.expert > 1 and kind.is_sparse)
    started_s += num_collectives * constants.collective_s if num_collectives else 0.0
    # weights that are gathered, and gradients that are reduced, each by itself
    is_one_by_one = software.shards_by == "weight" and is_sent_by_layer(layout)
    one_by_one_s = num_weights(model, kind) * operator_s if is_one_by_one else 0.0
    gathering_s = one_by_one_s if layout.shard == 3 else 0.0
    waited_s = 0.0 if hides_experts(software, layout) else expert_s
    whole = kind.blocks / 2  # of a layer of two blocks
    forward = LayerPass(
        products.forward_s + attention.forward_s + reading_s,
        tensor_s,
        whole * software.forward_operators * operator_s + started_s + of_experts_s + gathering_s,
        around_s,
        waited_s,
    )
    weights = LayerPass(products.weights_s, 0.0, products.num * operator_s)
    backward = LayerPass(
        products.inputs_s + products.weights_s + attention.backward_s + back_reading_s,
        tensor_back_s,
        whole * software.backward_operators * operator_s + started_s + 2 * of_experts_s + gathering_s + one_by_one_s,
        around_back_s,
        waited_s,
    )
    again_s = whole * software.recompute_operators * constants.operator_s
    if layout.recompute == "full":
        again = forward + LayerPass(0.0, 0.0, again_s)
        if software.stops_early:  # experts' results have been weighted before their last product
            again = _less(again, LayerPass(products.last_s, tensor_s / kind.blocks, 0.0, expert_s=waited_s / 2))
        backward += again.times(recomputed_share(model, layout))
    elif layout.recompute == "operators":
        backward += LayerPass(0.5 * products.forward_s + reading_s, 0.0, again_s)
    elif layout.recompute == "parts":
        backward += LayerPass(_parts_again(case, kind, rates, attention), 0.0, again_s)
    elif layout.recompute == "selective" and kind.mixer == "attention":
        backward += LayerPass(
            attention.forward_s + attention.score_bytes / rates.bytes_per_s, 0.0, again_s + gathering_s
        )
    work = LayerWork(forward, backward, _less(backward, weights), weights)
    parts = weight_parts(*layer_parameters(model, kind), layout)
    moved = 0.0
    if layout.offload_layers:
        moved = layer_share(model, layout, layout.offload_layers) * activation_bytes(model, layout, software, kind)
    return _beside(work, parts, case, expert_s=expert_s - waited_s, moved_bytes=moved)


def hides_experts(software: Software, layout: Layout) -> bool:
    """Whether experts' exchanges go on beside another micro-batch: only stages of a pipeline have one at work meanwhile."""
    return software.hides_experts and layout.pipeline > 1 and layout.expert > 1


def _parts_again(case: StepCase, kind: LayerKind, rates: Rates, attention: _AttentionPass) -> float:
    """Seconds of the parts that a backward computes again, by name."""
    model, layout, tokens = case.model, case.layout, case.tokens
    size = _itemsize(case)
    between = layout.tensor if layout.is_sequence_parallel else 1
    feed_forward = 0.0
    if kind.feed == "dense":
        matrices = feed_matrices(model, model.inner, layout.tensor)
        feed_forward = sum(product_s(rates, tokens, n, k, itemsize=size) for n, k in matrices)
    latent = 0.0
    if (model.key_rank or model.query_rank) and kind.mixer == "attention":
        ranks = tuple(rank for rank in (model.query_rank, model.key_rank) if rank)
        matrices = attention_matrices(model, layout.tensor)
        latent = sum(product_s(rates, tokens, n, k, itemsize=size) for n, k in matrices if k in ranks)
    seconds = {
        "attention": attention.forward_s + attention.score_bytes / rates.bytes_per_s
        if kind.mixer == "attention"
        else 0.0,
        "norms": 2 * kind.blocks * tokens * model.hidden * case.width / between / rates.bytes_per_s,
        "gates": 3 * _between_products(case, kind) / rates.bytes_per_s,
        "latent": latent,
        "feed-forward": feed_forward,
        "experts": sum(product_s(rates, m, n, k, batch=num, itemsize=size) for n, k, m, num in _expert_products(case))
        if kind.is_sparse
        else 0.0,
    }
    return sum(seconds[name] for name in layout.recomputed)


def _expert_products(case: StepCase) -> list[tuple[int, int, int, int]]:
    """Products of a rank's experts: columns, depth, tokens of each expert, and how many experts."""
    model, layout = case.model, case.layout
    local = max(1, model.num_experts // layout.expert)
    each = max(1, round(routed_tokens(case) / local))
    return [(n, k, each, local) for n, k in expert_matrices(model, layout.expert_ranks)]


def _itemsize(case: StepCase) -> float:
    """Bytes of a number that products take."""
    bits = _BITS.get(case.software.dtype)
    return case.width if bits is None else bits / 8


def _between_products(case: StepCase, kind: LayerKind) -> float:
    """Bytes of attention's vectors and of what is between the feed-forward's products, on one rank; of tokens as experts get
    them, with what orders them by experts and back. What a state-space mixer reads and writes is in `_states`.
    """
    model, layout, tokens = case.model, case.layout, case.tokens
    vectors = 0
    if kind.mixer == "attention":
        # queries, keys and values, or attention's result, which is as long; each with what turns them by their positions
        vectors = model.heads * (2 * model.query_width + model.head_width) if model.key_rank else 3 * model.hidden
    inner = {"experts": model.shared_inner, "dense": model.inner, "none": 0}[kind.feed]
    divided = tokens * (inner + vectors) / layout.tensor
    if kind.is_sparse:
        routed = routed_tokens(case)
        divided += routed * (model.expert_inner / layout.expert_ranks + _ORDERED * model.expert_width)
    return divided * case.width


def routed_tokens(case: StepCase) -> float:
    """Tokens, each as often as an expert takes it, that the fullest rank's experts get of a micro-batch."""
    layout, model = case.layout, case.model
    fullest = case.constants.routing_imbalance if layout.expert > 1 else 1.0
    return case.tokens * model.experts_per_token * fullest * layout.expert_ranks / layout.tensor


def _less(whole: LayerPass, part: LayerPass) -> LayerPass:
    return whole._replace(
        device_s=whole.device_s - part.device_s,
        tensor_s=whole.tensor_s - part.tensor_s,
        expert_s=whole.expert_s - part.expert_s,
        host_s=max(0.0, whole.host_s - part.host_s),
    )


def _beside(
    work: LayerWork,
    parts: tuple[WeightPart, ...],
    case: StepCase,
    *,
    expert_s: float = 0.0,
    moved_bytes: float = 0.0,
) -> LayerWork:
    """The same while its weights are gathered or copied, and its gradients sent; and tokens of another micro-batch,
    `expert_s`.
    """
    layout = case.layout
    fetch_s = scatter_s = weights_s = gradients_s = 0.0
    if is_sent_by_layer(layout):
        scatter_s = scattered_s(parts, case)
        fetch_s = gathered_s(parts, case.gathered_width, case) if layout.shard == 3 else 0.0
    if layout.offload == "weights":
        copy_s, whole, share = copies_of(case), device_parameters(parts), sharded_parameters(parts, layout)
        weights_s = copy_s((share if layout.shard == 3 else whole) * case.width)
        gradients_s = copy_s((share if layout.shard >= 2 else whole) * case.software.gradient_bytes)
    sent = (fetch_s + expert_s, fetch_s + scatter_s + expert_s, fetch_s + expert_s, scatter_s)
    if moved_bytes:  # activations go while the forward goes on, and come back for the backward
        moved_s = copies_of(case)(moved_bytes)
        weights_s, gradients_s = weights_s + moved_s, gradients_s + moved_s
    # weights come while gradients go: a link carries both at once
    copied = (weights_s, max(weights_s, gradients_s), weights_s, gradients_s)
    contention = case.constants.contention_share
    pairs = zip(work, sent, copied, strict=True)
    return LayerWork(*(one.besides(sent_s=s, copied_s=c, contention=contention) for one, s, c in pairs))


class _LayerProducts(NamedTuple):
    """Products with one layer's weights: seconds forward and of both kinds of gradients, bytes of casts, their number; seconds of
    the last ones forward; and bytes of adapters beside them.
    """

    forward_s: float
    inputs_s: float
    weights_s: float
    cast_bytes: float
    back_cast_bytes: float
    num: int
    last_s: float
    adapter_bytes: float
    back_adapter_bytes: float


def _products(case: StepCase, rates: Rates, kind: LayerKind) -> _LayerProducts:
    """The fullest expert rank's: it has more tokens than the mean, and the others wait for it. Experts' products are one grouped
    product, each with its own tokens."""
    model, layout, tokens = case.model, case.layout, case.tokens
    software = case.software
    has_less = software.dtype in _BITS
    whole = software.half_layers / model.layers if has_less else 0.0
    of_attention = 1.0 if "attention" in software.half_parts else whole
    every = [_LayerProduct(n, k, tokens, 1, of_attention) for n, k in mixer_matrices(model, kind, layout.tensor)]
    if kind.mixer == "state":
        every = [one._replace(half=whole) for one in every]
    last = every[-1:]
    if kind.is_sparse:
        shared = [_LayerProduct(n, k, tokens, 1, whole) for n, k in shared_matrices(model, layout.tensor)]
        if model.expert_hidden and "latent-experts" in software.half_parts:
            shared[-2:] = [one._replace(half=1.0) for one in shared[-2:]]
        experts = [_LayerProduct(*one, whole) for one in _expert_products(case)]
        every += [*experts, *shared]
        last = [experts[1], *(shared[1:2] if model.shared_inner else [])]
    elif kind.feed == "dense":
        feed = [_LayerProduct(n, k, tokens, 1, whole) for n, k in feed_matrices(model, model.inner, layout.tensor)]
        every, last = [*every, *feed], feed[1:2]
    cast = back_cast = 0.0
    if has_less:
        often = 1 / layout.num_micro_batches if software.casts_weights_once else 1.0
        cast = software.cast_passes * sum(one.less * _CAST * (one.m * one.k + often * one.n * one.k) for one in every)
        back_cast = software.cast_passes * sum(
            one.less * _CAST * one.m * one.n
            + one.less * _CAST_AGAIN * (software.trained_share * one.m * one.k + often * one.n * one.k)
            for one in every
        )
    half_rates, size = rates_of(case, case.product_dtype) if has_less else rates, _itemsize(case)

    def seconds(products: Iterable[_LayerProduct], order: str) -> float:
        """Of products with rows, columns and depth in that order of m, n and k."""
        total = 0.0
        for one in products:
            rows, columns, depth = (getattr(one, name) for name in order)
            for share, rates_, itemsize in ((1 - one.half, rates, size), (one.half, half_rates, case.width)):
                if share:
                    total += share * product_s(rates_, rows, columns, depth, batch=one.num, itemsize=itemsize)
        return total

    return _LayerProducts(
        seconds(every, "mnk"),
        seconds(every, "mkn"),
        software.trained_share * seconds(every, "nkm"),
        cast,
        back_cast,
        len(every),
        seconds(last, "mnk"),
        *_adapter_bytes(case, every if software.adapted == "all" else every[: kind.mixer == "attention"]),
    )


def _adapter_bytes(case: StepCase, products: Sequence[_LayerProduct]) -> tuple[float, float]:
    """Bytes that adapters read and write, forward and backward (LoRA; Hu et al., 2021): what a product takes; what its adapter
    gives, and the sum of both. Backward gradients of what it gives for both factors, what it takes for one, and the sum of
    gradients. Their own products are so small that this is what they take."""
    if not case.software.adapter_rank:
        return 0.0, 0.0
    forward = sum(one.num * one.m * (one.k + 4 * one.n) for one in products)
    backward = sum(one.num * one.m * (2 * one.n + 4 * one.k) for one in products)
    ranks = sum(6 * one.num * one.m * case.software.adapter_rank for one in products)
    return (forward + ranks) * case.width, (backward + ranks) * case.width


class _LayerProduct(NamedTuple):
    """`num` products with a weight of `n` columns and depth `k` for `m` tokens, of which a share `half` is made in half
    precision."""

    n: int
    k: int
    m: int
    num: int
    half: float

    @property
    def less(self) -> float:
        """How many are made in fewer bits."""
        return self.num * (1 - self.half)


class _AttentionPass(NamedTuple):
    """Seconds of its products in both directions, bytes of scores that are read and written, whether the softmax is one
    kernel.
    """

    forward_s: float
    backward_s: float
    score_bytes: float
    is_fused: bool


def _mixing(case: StepCase, rates: Rates, kind: LayerKind) -> _AttentionPass:
    """What mixes tokens, without the products with its weights."""
    if kind.mixer == "attention":
        return _attention(case, rates_of(case, case.product_dtype), kind)
    if kind.mixer == "state":
        return _states(case, rates)
    return _AttentionPass(0.0, 0.0, 0.0, True)


def _states(case: StepCase, rates: Rates) -> _AttentionPass:
    """A state-space mixer's convolution, its states in chunks, and its norm, by what they read and write (mamba_ssm's kernels of
    Mamba-2): each chunk's states, what goes from chunk to chunk, products within a chunk, and from states to tokens."""
    state, width = case.model.state, case.width
    if state is None:
        raise PlanError("a state-space mixer needs its sizes")
    shared = state.groups * state.size
    of_states = (
        4 * _FLOAT * state.inner * state.size / state.chunk
    )  # written, read, written as they are passed on, read
    of_chunks = 2 * _FLOAT * state.groups * state.chunk  # products of what goes in and out, of all pairs
    convolved = 2 * (state.inner + 2 * shared) * width
    read = (3 * state.inner + 4 * shared + 3 * state.inner) * width
    tokens = case.tokens / case.layout.tensor
    scanned_s = tokens * (read + of_states + of_chunks) / (_STATE_SHARE * rates.bytes_per_s)
    convolved_s = tokens * convolved / rates.bytes_per_s
    kernels_s = _STATE_KERNELS * rates.kernel_s
    return _AttentionPass(
        scanned_s + convolved_s + kernels_s, _STATE_BACKWARD * scanned_s + 2 * convolved_s + 2 * kernels_s, 0.0, True
    )


def _attention(case: StepCase, rates: Rates, kind: LayerKind) -> _AttentionPass:
    """What attention takes of one layer.

    Of contiguous pieces under a causal mask the last rank has the whole rows above its triangle: c - 1/2 squares of a piece's
    length where the mean is c/2, so (2c - 1) / c as much. Scores that are written are written whole, masked or not.
    """
    model, layout, software = case.model, case.layout, case.software
    groups = layout.micro_batch * model.heads // layout.tensor
    width, seq, context = model.head_width, model.seq, layout.context
    own = seq // context
    if software.attention == "fused":
        unequal = (2 * context - 1) / context if software.context_pieces == "contiguous" else 1.0
        # below the diagonal, and within the window
        visible = seq / 2 * unequal if kind.visible >= seq else min(seq / 2, kind.visible + _BLOCK)
        visible += compressed_visible(model, kind)
        flop = 2.0 * groups * own * visible * (model.query_width + width) + _index_flop(case, kind)
        peak = peak_flop_per_s(load_spec(case.cluster.device), case.product_dtype)
        forward_s = flop / (case.constants.attention_share * peak) + rates.kernel_s
        backward_s = _FUSED_BACKWARD * flop / (case.constants.attention_backward_share * peak) + rates.kernel_s
        return _AttentionPass(forward_s, backward_s, 0.0, True)
    size = case.width
    products_s = product_s(rates, own, seq, width, batch=groups, itemsize=size)
    products_s += product_s(rates, own, width, seq, batch=groups, itemsize=size)
    is_fused = software.attention == "megatron" and groups % _SOFTMAX_GROUP == 0
    return _AttentionPass(products_s, 2 * products_s, groups * own * seq * size * (4.5 if is_fused else 10.5), is_fused)


def _index_flop(case: StepCase, kind: LayerKind) -> float:
    """FLOP of the scores by which an indexer chooses compressed keys, forward."""
    keys = case.model.compressed
    if keys is None or kind.ratio not in keys.indexed:
        return 0.0
    return 2.0 * case.tokens / case.layout.tensor * case.model.seq / kind.ratio / 2 * keys.index_heads * keys.index_dim


def _around(case: StepCase, attention: _AttentionPass) -> tuple[float, float]:
    """Seconds in which context ranks exchange keys and values, forward and backward, as far as attention does not hide them.

    Gathered before it, and the sum of their gradients scattered after it, nothing is hidden. In a ring keys and values go round
    beside attention, and backward once more with their gradients, beside twice its work.
    """
    model, layout = case.model, case.layout
    keys = (1 if model.shares_keys else 2) * model.key_heads * model.head_width
    numbers = model.key_rank + model.rope_dim if model.key_rank else keys / layout.tensor
    num_bytes = layout.micro_batch * model.seq * numbers * case.width
    once_s = gather_s(num_bytes, layout.context, case.tiers, stride=layout.tensor)
    if case.software.context_exchange == "gathered":
        return once_s, once_s
    return max(0.0, once_s - attention.forward_s), max(0.0, 2 * once_s - attention.backward_s)


def _routed(case: StepCase) -> float:
    """Seconds in which tokens go to their experts and come back, in one direction of the step; the fullest rank gets the most.

    Tensor ranks that divide tokens between their products send their own part each. Where each token goes to a rank and crosses
    to a node once, whichever of its experts are there, fewer bytes are sent (DeepSeek-V3, 2024, section 3.2.2): to as many places
    as its experts have in the mean.
    """
    model, layout, cluster, software, constants = case
    sent = case.tokens * model.experts_per_token * constants.routing_imbalance
    sent /= layout.tensor if layout.is_sequence_parallel else layout.tensor / layout.expert_ranks
    own_ranks = layout.expert_ranks == layout.tensor and layout.data % layout.expert == 0
    stride = layout.tensor * layout.context if own_ranks else layout.expert_ranks
    near = crossing = 1.0
    if software.sends_once:
        takes, inside = model.experts_per_token, max(1, min(layout.expert, cluster.tiers[0].reach // stride))
        nodes = layout.expert // inside
        near = _distinct(layout.expert, takes) / takes
        crossing = min(_distinct(nodes, takes), model.expert_groups or nodes) / takes if nodes > 1 else 1.0
    bytes_of = (software.dispatch_bytes or case.width, case.width)
    return sum(
        all_to_all_s(
            sent * model.expert_width * each,
            layout.expert,
            case.tiers,
            stride=stride,
            near=near,
            crossing=crossing,
        )
        for each in bytes_of
    )


def _distinct(places: int, draws: int) -> float:
    """Places that so many independent draws meet in the mean."""
    return places * (1 - (1 - 1 / places) ** draws)


def head(case: StepCase) -> LayerWork:
    """The logits, their loss, and their backward, on one micro-batch."""
    model, layout, _, software, _ = case
    rates, tokens, ranks = rates_of(case, case.product_dtype), case.tokens, layout.tensor
    columns = -(-model.vocab // ranks)
    if software.pads_vocabulary and ranks > 1:
        columns = -(-columns // 128) * 128
    size = case.width
    # as they are, and in what the loss makes of them
    reading_s = tokens * columns * (size + software.loss_bytes) / rates.bytes_per_s
    weights_s = product_s(rates, columns, model.hidden, tokens, itemsize=size)
    weights_s *= software.trained_share
    inputs_s = product_s(rates, tokens, model.hidden, columns, itemsize=size)
    started_s = software.end_operators * started_s_of(case)
    forward = LayerPass(product_s(rates, tokens, columns, model.hidden, itemsize=size) + reading_s, 0.0, started_s)
    work = LayerWork(
        forward,
        LayerPass(inputs_s + weights_s + reading_s, 0.0, started_s),
        LayerPass(inputs_s + reading_s, 0.0, 0.0),
        LayerPass(weights_s, 0.0, 0.0),
    )
    if model.is_tied and layout.pipeline == 1:
        return work  # the embedding is there already
    return _beside(work, weight_parts(num_parameters(model)[1], 0, layout), case)


def embedding(case: StepCase) -> LayerWork:
    """What sends its weights, forward, and its gradients, backward, with nothing to hide it; looking up takes next to nothing."""
    parts = weight_parts(num_parameters(case.model)[1], 0, case.layout)
    work = _beside(LayerWork(NOTHING, NOTHING, NOTHING, NOTHING), parts, case)
    bare = LayerWork(*(one._replace(sent_s=0.0, slowed_s=one.sent_s) for one in work))
    return bare._replace(backward=bare.weights, inputs=NOTHING)


class Works(NamedTuple):
    """What a step is made of: layers by their kind, and what predicts a further token, without its layer and output."""

    layers: Mapping[LayerKind, LayerWork]
    head: LayerWork
    embedding: LayerWork
    joining: LayerWork

    def of_layers(self, kinds: Iterable[tuple[LayerKind, int]], pass_kind: str) -> LayerPass:
        """So many layers of those kinds."""
        total = NOTHING
        for kind, number in kinds:
            total += self.layers[kind].of(pass_kind).times(number)
        return total


def works(case: StepCase) -> Works:
    """Work of one micro-batch; cached, since many layouts have the same, whatever their pipelines are."""
    layout = case.layout
    sends = is_sent_by_layer(layout) or layout.offload != "none" or layout.expert > 1
    data = layout.data if sends else 1
    counts = case.software.casts_weights_once and case.software.dtype in _BITS
    alike = structs.replace(
        layout,
        pipeline=min(layout.pipeline, 2) if not layout.recompute_layers else layout.pipeline,
        data=data,
        global_batch=data * layout.micro_batch * (layout.num_micro_batches if counts else 1),
        shard_ranks=layout.shard_ranks if sends else 0,
        schedule="1f1b" if not layout.recompute_layers else layout.schedule,
        chunks=1 if not layout.recompute_layers else layout.chunks,
        counts_ends=False,
        compression="none",
    )
    return _works(case._replace(layout=alike))


@lru_cache(maxsize=1 << 13)
def _works(case: StepCase) -> Works:
    kinds = dict.fromkeys((*layer_kinds(case.model), *(extra_kinds(case.model) if case.model.extra_tokens else ())))
    return Works({kind: layer(case, kind) for kind in kinds}, head(case), embedding(case), _joining(case))


def _joining(case: StepCase) -> LayerWork:
    """The product that makes one vector of a token's and of the embedding of the next (multi-token prediction)."""
    if not case.model.extra_tokens:
        return LayerWork(NOTHING, NOTHING, NOTHING, NOTHING)
    hidden, rates = case.model.hidden, rates_of(case, case.software.dtype)
    once = LayerPass(
        product_s(rates, case.tokens, hidden, 2 * hidden, itemsize=case.width) / case.layout.tensor, 0.0, 0.0
    )
    return LayerWork(once, once.times(2), once, once)
