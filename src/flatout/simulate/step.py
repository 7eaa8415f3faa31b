"""How long a step of a transformer takes under a layout, from the work of its layers, the links, and the pipeline's schedule.

The host starts operators one after the other; a device that is done earlier waits for it. So a layer takes the longer of what its
operators take on the device and what the host takes to start them (Constants.operator_s), and never the sum.
"""

# T tokens of a micro-batch, H hidden width

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from flatout.cost.collectives import all_reduce_s, gather_s, send_s
from flatout.cost.products import Rates, product_s
from flatout.cost.roofline import bandwidth_bytes_per_s, peak_flop_per_s
from flatout.cost.schedules import Action, Table, played, span_s, table_of
from flatout.errors import PlanError
from flatout.hardware.catalog import load
from flatout.records.scale import Cluster, Constants, Layout, ModelShape, ScheduleKind, Software, StepTime

_HALF: Final = 2
"""Bytes of a number in half precision."""
_SOFTMAX_GROUP: Final = 4
"""Megatron's fused softmax takes attention whose samples x heads are a multiple of it (fused_kernels, batches_per_block)."""


class Pass(NamedTuple):
    """Of one layer, or of the head, in one direction: seconds of the device without collectives, of collectives, of the host, and
    of weights and gradients that are sent meanwhile."""

    device_s: float
    collective_s: float
    host_s: float
    sent_s: float = 0.0

    @property
    def own_s(self) -> float:
        """What it takes where nothing is sent."""
        return max(self.device_s + self.collective_s, self.host_s)

    @property
    def total_s(self) -> float:
        """What it takes."""
        return max(self.own_s, self.sent_s)

    def __add__(self, other: object) -> Pass:
        if not isinstance(other, Pass):
            return NotImplemented
        return Pass(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Pass:
        """As often."""
        return Pass(*(factor * x for x in self))


def step_time(
    model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> StepTime:
    """Seconds of one step and what they are made of.

    Raises PlanError when the layout does not fit the model or the cluster, HardwareError when the device's data sheet lacks a
    figure.
    """
    _check(model, layout, cluster)
    rates = rates_of(cluster.device, software.dtype, constants)
    forward, backward = layer(model, layout, cluster, software, constants, rates)
    head = _head(model, layout, software, rates)
    stages, micro = layout.pipeline, layout.num_micro_batches
    num_chunks = stages * layout.chunks
    per_chunk = model.layers / num_chunks
    boundary = layout.micro_batch * model.seq * model.hidden * _HALF
    hop_s = send_s(boundary, cluster.tiers, stride=layout.tensor * layout.data, share=constants.link_share)

    def whole(kind: str, chunk: int) -> Pass:
        own = (forward if kind == "F" else backward).times(per_chunk)
        return own + head[kind == "B"] if chunk == num_chunks - 1 else own

    costs = {(kind, chunk): whole(kind, chunk) for kind in "FB" for chunk in range(num_chunks)}

    def seconds(action: Action) -> float:
        return costs[action.kind, action.chunk].total_s

    pipeline_s = _span_s(layout, hop_s, seconds)
    of_stages = [[costs[k, c] for k in "FB" for c in range(s, num_chunks, stages)] for s in range(stages)]
    busiest = max(of_stages, key=lambda passes: sum(p.total_s for p in passes))
    hidden_s = min(sum(costs["B", c].own_s for c in range(s, num_chunks, stages)) for s in range(stages))
    data_s, optimizer_s = _update(model, layout, cluster, software, constants, rates, hidden_s=hidden_s)
    return StepTime(
        total_s=pipeline_s + data_s + optimizer_s + constants.step_s,
        compute_s=micro * sum(p.device_s for p in busiest),
        host_s=micro * sum(max(0.0, p.own_s - p.device_s - p.collective_s) for p in busiest),
        tensor_s=micro * sum(p.collective_s for p in busiest),
        bubble_s=max(0.0, pipeline_s - micro * sum(p.total_s for p in busiest)),
        data_s=data_s + micro * sum(p.total_s - p.own_s for p in busiest),
        optimizer_s=optimizer_s,
        step_s=constants.step_s,
    )


def rates_of(device: str, dtype: str, constants: Constants) -> Rates:
    """Of a device's data sheet, as far as they are reached."""
    spec = load(device)
    if spec.num_units is None:
        raise PlanError(f"the data sheet of '{device}' does not say how many multiprocessors it has")
    return Rates(
        flop_per_s=peak_flop_per_s(spec, dtype) * constants.product_share,
        bytes_per_s=bandwidth_bytes_per_s(spec) * constants.memory_share,
        num_units=int(spec.num_units.value),
        fill_depth=constants.fill_depth,
        misaligned_share=constants.misaligned_share,
        kernel_s=constants.kernel_s,
    )


def layer(
    model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants, rates: Rates
) -> tuple[Pass, Pass]:
    """One layer on one micro-batch, forward and backward; what is computed again is in the backward."""
    ranks, samples = layout.tensor, layout.micro_batch
    tokens, hidden = samples * model.seq, model.hidden
    matrices = _matrices(model, ranks, feeds=model.experts_per_token)
    forward_s = sum(product_s(rates, tokens, n, k) for n, k in matrices)
    inputs_s = sum(product_s(rates, tokens, k, n) for n, k in matrices)
    weights_s = sum(product_s(rates, n, k, tokens) for n, k in matrices)
    of_attention, score_bytes, is_fused = _attention(model, samples, ranks, software, rates)
    whole_bytes, divided_bytes = tokens * hidden * _HALF, tokens * (model.inner + 3 * hidden) / ranks * _HALF
    # two norms (read, write), two dropouts with residuals (read two, write one and a mask): each rank has all of them
    around = 12 * whole_bytes / (ranks if layout.is_sequence_parallel else 1) + 3 * divided_bytes
    reading_s = (around + score_bytes) / rates.bytes_per_s + 10 * rates.kernel_s
    back_reading_s = (1.3 * around + 1.4 * score_bytes) / rates.bytes_per_s + 12 * rates.kernel_s
    reduce_s = all_reduce_s(whole_bytes, ranks, cluster.tiers, share=constants.link_share)
    started_s = (0 if is_fused else software.unfused_softmax_operators) * constants.operator_s
    started_s += 2 * constants.collective_s if ranks > 1 else 0.0
    fetch_s = 0.0
    if layout.shard == 3:
        own_bytes = num_parameters(model)[0] / ranks * _HALF
        fetch_s = gather_s(own_bytes, layout.data, cluster.tiers, stride=ranks, share=constants.link_share)
        started_s += constants.collective_s
    forward = Pass(
        forward_s + of_attention + reading_s,
        2 * reduce_s,
        software.forward_operators * constants.operator_s + started_s,
        fetch_s,
    )
    backward = Pass(
        inputs_s + weights_s + 2 * of_attention + back_reading_s,
        2 * reduce_s,
        software.backward_operators * constants.operator_s + started_s,
        fetch_s * (1 + software.gradient_bytes / _HALF),
    )
    if layout.recompute == "full":
        return forward, backward + forward._replace(sent_s=0.0)
    if layout.recompute == "selective":
        return forward, backward + Pass(of_attention + score_bytes / rates.bytes_per_s, 0.0, 4 * constants.operator_s)
    return forward, backward


def num_parameters(model: ModelShape) -> tuple[int, int]:
    """(of one layer with all its experts, of one embedding), norms and biases left out: they are a thousandth.

    >>> num_parameters(ModelShape(hidden=1024, layers=24, heads=16, vocab=50257, seq=1024))
    (12582912, 51463168)
    """
    return sum(n * k for n, k in _matrices(model, 1, feeds=model.num_experts)), model.vocab * model.hidden


def num_active(model: ModelShape) -> int:
    """Parameters of one layer that a token meets: those of its own experts."""
    return sum(n * k for n, k in _matrices(model, 1, feeds=model.experts_per_token))


def _matrices(model: ModelShape, ranks: int, *, feeds: int) -> tuple[tuple[int, int], ...]:
    """(columns of the result, depth) of the weights on one of `ranks`, with so many feed-forwards."""
    keys = model.key_heads * model.head_width
    attention = ((model.hidden + 2 * keys) // ranks, model.hidden), (model.hidden, model.hidden // ranks)
    up = (model.inner // ranks, model.hidden)
    feed = (up, (model.hidden, model.inner // ranks), *((up,) if model.is_gated else ()))
    return (*attention, *(feed * feeds))


def _attention(
    model: ModelShape, samples: int, ranks: int, software: Software, rates: Rates
) -> tuple[float, float, bool]:
    """Seconds of its products, bytes of scores that are read and written, whether the softmax is one kernel."""
    groups = samples * model.heads // ranks
    width, seq = model.head_width, model.seq
    if software.attention == "fused":
        flop = 4.0 * groups * seq * seq * width / 2
        return flop / (0.7 * rates.flop_per_s) + rates.kernel_s, 0.0, True
    products_s = product_s(rates, seq, seq, width, batch=groups) + product_s(rates, seq, width, seq, batch=groups)
    is_fused = software.attention == "megatron" and groups % _SOFTMAX_GROUP == 0
    once = groups * seq * seq * _HALF
    return products_s, once * (4.5 if is_fused else 10.5), is_fused


def _head(model: ModelShape, layout: Layout, software: Software, rates: Rates) -> tuple[Pass, Pass]:
    """The logits, their loss, and the way back, on one micro-batch."""
    tokens, ranks = layout.micro_batch * model.seq, layout.tensor
    columns = -(-model.vocab // ranks)
    if software.pads_vocabulary and ranks > 1:
        columns = -(-columns // 128) * 128
    num_bytes = tokens * columns
    forward_s = product_s(rates, tokens, columns, model.hidden) + num_bytes * 10 / rates.bytes_per_s
    backward_s = (
        product_s(rates, tokens, model.hidden, columns)
        + product_s(rates, columns, model.hidden, tokens)
        + num_bytes * 10 / rates.bytes_per_s
    )
    return Pass(forward_s, 0.0, 0.0), Pass(backward_s, 0.0, 0.0)


def _update(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    rates: Rates,
    *,
    hidden_s: float,
) -> tuple[float, float]:
    """Seconds of the reduction of gradients over data ranks as far as it is not hidden, and of the optimizer.

    What overlaps does so with the last micro-batch's backward, `hidden_s`; the last layer's gradients are always left.
    """
    of_layer, of_embedding = num_parameters(model)
    own = of_layer * model.layers / (layout.pipeline * layout.tensor) + of_embedding / layout.tensor
    reduce_s = all_reduce_s(
        own * software.gradient_bytes, layout.data, cluster.tiers, stride=layout.tensor, share=constants.link_share
    )
    if layout.shard == 3:
        reduce_s = 0.0  # sent layer by layer
    elif software.has_overlap:
        reduce_s = max(reduce_s - hidden_s, reduce_s / max(1.0, model.layers / layout.pipeline))
    tied_s = 0.0
    if model.is_tied and layout.pipeline > 1:
        stride = layout.tensor * layout.data * (layout.pipeline - 1)
        tied_s = all_reduce_s(
            of_embedding / layout.tensor * software.gradient_bytes,
            2,
            cluster.tiers,
            stride=stride,
            share=constants.link_share,
        )
    updated = own / (layout.data if layout.shard else 1)
    return reduce_s + tied_s, updated * software.optimizer_bytes / rates.bytes_per_s


def _span_s(layout: Layout, hop_s: float, seconds: Callable[[Action], float]) -> float:
    table = _table(layout.schedule, layout.pipeline, layout.num_micro_batches, layout.chunks)
    return span_s(played(table, seconds=seconds, send_s=hop_s, chunks=layout.chunks))


@lru_cache(maxsize=512)
def _table(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int) -> Table:
    return table_of(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)


def _check(model: ModelShape, layout: Layout, cluster: Cluster) -> None:
    if layout.num_devices > cluster.num_devices:
        raise PlanError(f"the layout takes {layout.num_devices} devices, and there are {cluster.num_devices}")
    if model.heads % layout.tensor or model.inner % layout.tensor:
        raise PlanError(f"{model.heads} heads and a width of {model.inner} cannot be divided by tensor={layout.tensor}")
    if model.layers < layout.pipeline * layout.chunks:
        raise PlanError(f"{model.layers} layers are fewer than {layout.pipeline} stages x {layout.chunks} chunks")
