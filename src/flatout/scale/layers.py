"""What one layer, the head and the embedding take of a device, of its host and of its links, for one micro-batch.

The host starts operators one after the other; a device that is done earlier waits for it. So a layer takes the longer of what its
operators take on the device and what the host takes to start them (Constants.operator_s), and never the sum.
"""

# T tokens of a micro-batch on one rank, H hidden width

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core.errors import PlanError
from flatout.machine.cost.collectives import all_reduce_s, all_to_all_s, gather_s
from flatout.machine.cost.roofline import bandwidth_bytes_per_s, peak_flop_per_s
from flatout.machine.cost.waves import Rates, product_s
from flatout.machine.specs.catalog import load_spec
from flatout.scale.case import StepCase
from flatout.scale.links import copies_of, gathered_s, is_sent_by_layer, scattered_s
from flatout.scale.sizes import (
    WeightPart,
    device_parameters,
    layer_parameters,
    matrices,
    num_parameters,
    num_weights,
    sharded_parameters,
    weight_parts,
)

_SOFTMAX_GROUP: Final = 4
"""Megatron's fused softmax takes attention whose samples x heads are a multiple of it (fused_kernels, batches_per_block)."""
_FUSED_SHARE: Final = 0.7
"""Of the rate of products, by fused attention (FlashAttention-2, Dao, 2023, figure 4: 50 to 73 % of an A100's rate)."""
_FUSED_BACKWARD: Final = 2.5
"""Times the forward's work: five products, as scores are made again, where the forward has two (the same, section 3.1)."""
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
        flop_per_s=peak_flop_per_s(spec, dtype) * constants.product_share,
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


def layer(case: StepCase) -> LayerWork:
    """One layer on one micro-batch; what is computed again is in the backward, and in its inputs' part."""
    model, layout, cluster, software, constants = case
    rates, operator_s = rates_of(case, software.dtype), started_s_of(case)
    ranks, width, tokens, hidden = layout.tensor, case.width, case.tokens, model.hidden
    products = _products(case, rates)
    of_attention, score_bytes, is_fused = _attention(case, rates_of(case, case.product_dtype))
    whole_bytes, divided_bytes = tokens * hidden * width, tokens * (model.inner + 3 * hidden) / ranks * width
    # two norms (read, write), two dropouts with residuals (read two, write one and a mask): each rank has all of them
    around = 12 * whole_bytes / (ranks if layout.is_sequence_parallel else 1) + 3 * divided_bytes
    reading_s = (around + score_bytes + products.cast_bytes) / rates.bytes_per_s + 10 * rates.kernel_s
    back_reading_s = (1.3 * around + 1.4 * score_bytes + products.back_cast_bytes) / rates.bytes_per_s
    back_reading_s += 12 * rates.kernel_s
    reduce_s = all_reduce_s(whole_bytes, ranks, cluster.tiers, share=constants.link_share)
    around_s, around_back_s = _around(case, of_attention)
    expert_s = _routed(case)
    started_s = (0 if is_fused else software.unfused_softmax_operators) * operator_s
    num_collectives = 2 * (ranks > 1) + (layout.context > 1) + 2 * (layout.expert > 1) + (layout.shard == 3)
    started_s += num_collectives * constants.collective_s if num_collectives else 0.0
    # weights that are gathered, and gradients that are reduced, each by itself
    is_one_by_one = software.shards_by == "weight" and is_sent_by_layer(layout)
    one_by_one_s = num_weights(model) * operator_s if is_one_by_one else 0.0
    gathering_s = one_by_one_s if layout.shard == 3 else 0.0
    forward = LayerPass(
        products.forward_s + of_attention + reading_s,
        2 * reduce_s,
        software.forward_operators * operator_s + started_s + gathering_s,
        around_s,
        expert_s,
    )
    weights = LayerPass(products.weights_s, 0.0, products.num * operator_s)
    again = _FUSED_BACKWARD if software.attention == "fused" else 2.0
    backward = LayerPass(
        products.inputs_s + products.weights_s + again * of_attention + back_reading_s,
        2 * reduce_s,
        software.backward_operators * operator_s + started_s + gathering_s + one_by_one_s,
        around_back_s,
        expert_s,
    )
    again_s = software.recompute_operators * constants.operator_s
    if layout.recompute == "full":
        backward += forward + LayerPass(0.0, 0.0, again_s - gathering_s)
    elif layout.recompute == "selective":
        backward += LayerPass(of_attention + score_bytes / rates.bytes_per_s, 0.0, again_s)
    work = LayerWork(forward, backward, _less(backward, weights), weights)
    return _beside(work, weight_parts(*layer_parameters(model), layout), case)


def _less(whole: LayerPass, part: LayerPass) -> LayerPass:
    return whole._replace(device_s=whole.device_s - part.device_s, host_s=max(0.0, whole.host_s - part.host_s))


def _beside(work: LayerWork, parts: tuple[WeightPart, ...], case: StepCase) -> LayerWork:
    """The same while its weights are gathered or copied, and its gradients sent."""
    layout = case.layout
    fetch_s = scatter_s = weights_s = gradients_s = 0.0
    if is_sent_by_layer(layout):
        scatter_s = scattered_s(parts, case)
        fetch_s = gathered_s(parts, case.width, case) if layout.shard == 3 else 0.0
    if layout.offload == "weights":
        copy_s, whole, share = copies_of(case), device_parameters(parts), sharded_parameters(parts, layout)
        weights_s = copy_s((share if layout.shard == 3 else whole) * case.width)
        gradients_s = copy_s((share if layout.shard >= 2 else whole) * case.software.gradient_bytes)
    sent = (fetch_s, fetch_s + scatter_s, fetch_s, scatter_s)
    # weights come while gradients go: a link carries both at once
    copied = (weights_s, max(weights_s, gradients_s), weights_s, gradients_s)
    contention = case.constants.contention_share
    pairs = zip(work, sent, copied, strict=True)
    return LayerWork(*(one.besides(sent_s=s, copied_s=c, contention=contention) for one, s, c in pairs))


class _LayerProducts(NamedTuple):
    """Products with one layer's weights: seconds forward and of both kinds of gradients, bytes of casts, their number."""

    forward_s: float
    inputs_s: float
    weights_s: float
    cast_bytes: float
    back_cast_bytes: float
    num: int


def _products(case: StepCase, rates: Rates) -> _LayerProducts:
    """The fullest expert rank's: it has more tokens than the mean, and the others wait for it."""
    attention, feed = matrices(case.model, case.layout.tensor)
    tokens, fullest = case.tokens, case.constants.routing_imbalance if case.layout.expert > 1 else 1.0
    of_experts = feed * case.model.experts_per_token
    every = [*((n, k, 1.0) for n, k in attention), *((n, k, fullest) for n, k in of_experts)]
    is_cast = case.software.dtype == "float8"
    size = 1 if is_cast else case.width
    cast = back_cast = 0.0
    if is_cast:
        cast = sum(_CAST * (f * tokens * k + n * k) for n, k, f in every)
        back_cast = sum(_CAST * f * tokens * n + _CAST_AGAIN * (f * tokens * k + n * k) for n, k, f in every)
    return _LayerProducts(
        sum(f * product_s(rates, tokens, n, k, itemsize=size) for n, k, f in every),
        sum(f * product_s(rates, tokens, k, n, itemsize=size) for n, k, f in every),
        sum(f * product_s(rates, n, k, tokens, itemsize=size) for n, k, f in every),
        cast,
        back_cast,
        len(every),
    )


def _attention(case: StepCase, rates: Rates) -> tuple[float, float, bool]:
    """Seconds of its products, bytes of scores that are read and written, whether the softmax is one kernel.

    Of contiguous pieces under a causal mask the last rank has the whole rows above its triangle: c - 1/2 squares of a piece's
    length where the mean is c/2, so (2c - 1) / c as much. Scores that are written are written whole, masked or not.
    """
    model, layout, software = case.model, case.layout, case.software
    groups = layout.micro_batch * model.heads // layout.tensor
    width, seq, context = model.head_width, model.seq, layout.context
    own = seq // context
    if software.attention == "fused":
        unequal = (2 * context - 1) / context if software.context_pieces == "contiguous" else 1.0
        flop = 4.0 * groups * own * seq * width / 2 * unequal
        return flop / (_FUSED_SHARE * rates.flop_per_s) + rates.kernel_s, 0.0, True
    size = case.width
    products_s = product_s(rates, own, seq, width, batch=groups, itemsize=size)
    products_s += product_s(rates, own, width, seq, batch=groups, itemsize=size)
    is_fused = software.attention == "megatron" and groups % _SOFTMAX_GROUP == 0
    return products_s, groups * own * seq * size * (4.5 if is_fused else 10.5), is_fused


def _around(case: StepCase, attention_s: float) -> tuple[float, float]:
    """Seconds in which context ranks exchange keys and values, forward and backward, as far as attention does not hide them.

    Gathered before it, and the sum of their gradients scattered after it, nothing is hidden. In a ring keys and values go round
    beside attention, and backward once more with their gradients, beside twice its work.
    """
    model, layout, tiers, share = case.model, case.layout, case.cluster.tiers, case.constants.link_share
    num_bytes = layout.micro_batch * model.seq * 2 * model.key_heads * model.head_width * case.width / layout.tensor
    once_s = gather_s(num_bytes, layout.context, tiers, stride=layout.tensor, share=share)
    if case.software.context_exchange == "gathered":
        return once_s, once_s
    return max(0.0, once_s - attention_s), max(0.0, 2 * once_s - 2 * attention_s)


def _routed(case: StepCase) -> float:
    """Seconds in which tokens go to their experts and come back, in one direction of the step; the fullest rank gets the most.

    Tensor ranks that divide tokens between their products send their own part each.
    """
    model, layout, cluster, _, constants = case
    own = float(case.tokens * case.width * model.hidden * model.experts_per_token)
    own = own * constants.routing_imbalance / (layout.tensor if layout.is_sequence_parallel else 1)
    stride = layout.tensor * layout.context
    return 2 * all_to_all_s(own, layout.expert, cluster.tiers, stride=stride, share=constants.link_share)


def head(case: StepCase) -> LayerWork:
    """The logits, their loss, and their backward, on one micro-batch."""
    model, layout, _, software, _ = case
    rates, tokens, ranks = rates_of(case, case.product_dtype), case.tokens, layout.tensor
    columns = -(-model.vocab // ranks)
    if software.pads_vocabulary and ranks > 1:
        columns = -(-columns // 128) * 128
    size = case.width
    reading_s = tokens * columns * (size + 8) / rates.bytes_per_s  # as they are, and in float32 for the loss
    weights_s = product_s(rates, columns, model.hidden, tokens, itemsize=size)
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
    """What a step is made of."""

    layer: LayerWork
    head: LayerWork
    embedding: LayerWork


def works(case: StepCase) -> Works:
    """Work of one micro-batch; cached, since many layouts have the same, whatever their pipelines are."""
    layout = case.layout
    sends = is_sent_by_layer(layout) or layout.offload != "none"
    data = layout.data if sends else layout.expert
    alike = structs.replace(
        layout,
        pipeline=min(layout.pipeline, 2),
        data=data,
        global_batch=data * layout.micro_batch,
        shard_ranks=layout.shard_ranks if sends else 0,
        schedule="1f1b",
        chunks=1,
        compression="none",
    )
    return _works(case._replace(layout=alike))


@lru_cache(maxsize=1 << 13)
def _works(case: StepCase) -> Works:
    return Works(layer(case), head(case), embedding(case))
