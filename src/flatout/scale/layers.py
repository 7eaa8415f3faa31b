"""What one layer, the head and the embedding take of a device, of its host and of its links, for one micro-batch.

The host starts operators one after the other; a device that is done earlier waits for it. So a layer takes the longer of what its
operators take on the device and what the host takes to start them (Constants.operator_s), and never the sum.
"""

# T tokens of a micro-batch on one rank, H hidden width

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core.records.scale import Layout, Software
from flatout.machine.cost.collectives import all_reduce_s, all_to_all_s
from flatout.machine.cost.waves import Rates, product_s
from flatout.scale.activations import activation_bytes, layer_share, recomputed_share
from flatout.scale.case import StepCase
from flatout.scale.links import copies_of, gathered_s, is_sent_by_layer, scattered_s
from flatout.scale.mixing import MixingPass, around_s_of, mixing
from flatout.scale.products import FEWER_BITS, expert_products, layer_products, product_itemsize, routed_tokens
from flatout.scale.rates import rates_of, started_s_of
from flatout.scale.sizes import (
    LayerKind,
    WeightPart,
    attention_matrices,
    device_parameters,
    extra_kinds,
    feed_matrices,
    layer_kinds,
    layer_parameters,
    num_parameters,
    num_weights,
    sharded_parameters,
    weight_parts,
)

_ORDERED: Final = 4 / 3
"""Tokens are read and written when they are put in their experts' order and back; a third, as bytes here count three times."""
_ROUTING_KERNELS: Final = 12
"""Kernels of a router: its product, softmax, the largest, counts and offsets, and the order of tokens there and back."""


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


# -- work -----------------------------------------------------------------------------------------------------------------


def layer(case: StepCase, kind: LayerKind) -> LayerWork:
    """One layer on one micro-batch; what is computed again is in the backward, and in its inputs' part."""
    model, layout, _, software, constants = case
    rates, operator_s = rates_of(case, software.dtype), started_s_of(case)
    ranks, width, tokens, hidden = layout.tensor, case.width, case.tokens, model.hidden
    products = layer_products(case, rates, kind)
    attention = mixing(case, rates, kind)
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
    # tokens stay divided among tensor ranks that hold whole experts, but not those of shared experts, which are divided
    has_whole = kind.is_sparse and layout.expert_ranks < ranks and not model.shared_inner
    tensor_s = (kind.blocks - has_whole) * reduce_s
    tensor_back_s = tensor_s
    if software.tensor_hidden and ranks > 1:
        tensor_s, tensor_back_s = (
            tensor_s - min(software.tensor_hidden * tensor_s * (1 - 1 / ranks), beside_s)
            for beside_s in (products.forward_s, products.inputs_s + products.weights_s)
        )
    around_s, around_back_s = around_s_of(case, attention) if kind.mixer == "attention" else (0.0, 0.0)
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
    reducing_s = software.reduce_operators * one_by_one_s
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
        whole * software.backward_operators * operator_s + started_s + 2 * of_experts_s + gathering_s + reducing_s,
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


def _parts_again(case: StepCase, kind: LayerKind, rates: Rates, attention: MixingPass) -> float:
    """Seconds of the parts that a backward computes again, by name."""
    model, layout, tokens = case.model, case.layout, case.tokens
    size = product_itemsize(case)
    between = layout.tensor if layout.is_sequence_parallel else 1
    feed_forward = 0.0
    if kind.feed == "dense":
        matrices = feed_matrices(model, model.inner, layout.tensor)
        feed_forward = sum(product_s(rates, tokens, n, k, itemsize=size, result_bytes=case.width) for n, k in matrices)
    latent = 0.0
    if (model.key_rank or model.query_rank) and kind.mixer == "attention":
        ranks = tuple(rank for rank in (model.query_rank, model.key_rank) if rank)
        matrices = attention_matrices(model, layout.tensor)
        latent = sum(
            product_s(rates, tokens, n, k, itemsize=size, result_bytes=case.width) for n, k in matrices if k in ranks
        )
    seconds = {
        "attention": attention.forward_s + attention.score_bytes / rates.bytes_per_s
        if kind.mixer == "attention"
        else 0.0,
        "norms": 2 * kind.blocks * tokens * model.hidden * case.width / between / rates.bytes_per_s,
        "gates": 3 * _between_products(case, kind) / rates.bytes_per_s,
        "latent": latent,
        "feed-forward": feed_forward,
        "experts": sum(
            product_s(rates, m, n, k, batch=num, itemsize=size, result_bytes=case.width)
            for n, k, m, num in expert_products(case)
        )
        if kind.is_sparse
        else 0.0,
    }
    return sum(seconds[name] for name in layout.recomputed)


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
    counts = case.software.casts_weights_once and case.software.dtype in FEWER_BITS
    alike = structs.replace(
        layout,
        pipeline=min(layout.pipeline, 2) if not layout.recompute_layers else layout.pipeline,
        data=data,
        global_batch=data
        * layout.micro_batch
        * (layout.num_micro_batches if counts else min(2, layout.num_micro_batches)),
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
