"""What comes once a step: data ranks reduce gradients, the optimizer updates, and what it needs comes from where it was put."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.cost.collectives import all_reduce_s
from flatout.cost.products import Rates
from flatout.cost.schedules import chunks_of_stages, layers_of_chunks
from flatout.records.scale import FOLDED, Cluster, Constants, Layout, ModelShape, Software
from flatout.simulate.layers import rates_of, started_s_of
from flatout.simulate.links import copies_of, gathered_s, is_sent_by_layer, scattered_s
from flatout.simulate.sizes import (
    Part,
    factor_parameters,
    held,
    layer_parameters,
    num_parameters,
    num_weights,
    number_bytes,
    parts_of,
    sharded,
)

POWER_RANK: Final = 4
"""Of PowerSGD's factors (Vogels et al., 2019, table 3: rank 4 for language models)."""
_POWER_PASSES: Final = 6
"""Times that PowerSGD goes through all gradients: error added (read two, write one), read for both factors, product written."""
_SIGN_PASSES: Final = 4
"""The same for signs: gradient and error read, signs made, error written."""
_FLOAT: Final = 4


class Update(NamedTuple):
    """Seconds beyond what the backward hides."""

    data_s: float
    optimizer_s: float
    offload_s: float


def update_time(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    *,
    hidden_s: float,
    span_s: float,
) -> Update:
    """Of the stage with the most layers. What overlaps does so with the last micro-batch's backward, `hidden_s`; the last layer's
    gradients are always left. What goes out to the host has the next step's forward and backward, `span_s`, to do so.

    Raises PlanError for an offload where the cluster does not say what joins devices and host.
    """
    rates = rates_of(cluster.device, "bfloat16" if software.dtype == "float8" else software.dtype, constants)
    layers = most_layers(model, layout)
    dense, experts = layer_parameters(model)
    of_embedding = num_parameters(model)[1]
    embeddings = 1 if model.is_tied or (layout.pipeline > 1 and layout.schedule not in FOLDED) else 2
    parts = parts_of(dense * layers + of_embedding * embeddings, experts * layers, layout)
    if layout.compression == "none":
        reduce_s = _reduced_s(parts, layout, cluster, software, constants)
    else:
        reduce_s = _compressed_s(model, layout, cluster, software, constants, parts, layers)
    exposed_s = reduce_s
    if software.has_overlap:
        exposed_s = max(reduce_s - hidden_s, reduce_s / max(1.0, layers))
        exposed_s += constants.contention_share * min(reduce_s, hidden_s)
    exposed_s += _compressing_s(layout, software, parts, rates)
    exposed_s += _tied_s(of_embedding, layout, cluster, software, constants) if model.is_tied else 0.0
    updated = sharded(parts, layout) if layout.shard else held(parts)
    optimizer_s = updated * software.optimizer_bytes / rates.bytes_per_s
    offload_s = 0.0
    if layout.offload != "none":
        copy_s = copies_of(layout, cluster, constants)(updated * software.state_bytes)
        offload_s = copy_s + max(0.0, copy_s - span_s)
    return Update(exposed_s, optimizer_s, offload_s)


def started_once_s(model: ModelShape, layout: Layout, software: Software, constants: Constants) -> float:
    """Of the host, for a stage's weights that are gathered and gradients that are reduced once a step, each by itself."""
    if software.shards_by != "weight" or is_sent_by_layer(layout):
        return 0.0
    return 2 * most_layers(model, layout) * num_weights(model) * started_s_of(layout, software, constants)


def most_layers(model: ModelShape, layout: Layout) -> int:
    """Of the stage that has the most, by even shares."""
    parts = layout.parts_per_stage
    layers = layers_of_chunks(model.layers, layout.pipeline * parts)
    stages = chunks_of_stages(layout.schedule, stages=layout.pipeline, parts=parts)
    return max(sum(layers[chunk] for chunk in chunks) for chunks in stages)


def _reduced_s(
    parts: tuple[Part, ...], layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> float:
    """What is sent once a step: all gradients, or their shards and the weights that come of them; among groups of shards too."""
    if layout.shard == 0:
        return _all_reduced_s(parts, software.gradient_bytes, layout, cluster, constants)
    if layout.shard == 3 and is_sent_by_layer(layout):
        return 0.0
    weights_s = gathered_s(parts, number_bytes(software), layout, cluster, constants)
    return weights_s + (0.0 if is_sent_by_layer(layout) else scattered_s(parts, layout, cluster, software, constants))


def _all_reduced_s(
    parts: tuple[Part, ...], each: float, layout: Layout, cluster: Cluster, constants: Constants
) -> float:
    """Numbers of `each` bytes, over the ranks that hold the same."""
    return sum(
        all_reduce_s(
            part.numbers * each,
            max(1, layout.context * layout.data // part.expert),
            cluster.tiers,
            stride=layout.tensor * part.expert,
            share=constants.link_share,
        )
        for part in parts
    )


def _compressed_s(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    parts: tuple[Part, ...],
    layers: int,
) -> float:
    """Sent in half precision; as PowerSGD's two factors in float32; or as signs of a bit each, from each rank to all, since signs
    do not add up (EF-SignSGD, Karimireddy et al., 2019): a scale for each tensor is next to nothing."""
    if layout.compression == "bfloat16":
        return _all_reduced_s(parts, min(2, software.gradient_bytes), layout, cluster, constants)
    if layout.compression == "sign":  # gathering n of them is half an all-reduce of n times as much
        return _all_reduced_s(parts, layout.context * layout.data / 16, layout, cluster, constants)
    dense, experts = factor_parameters(model, layout.tensor, rank=POWER_RANK)
    ends = POWER_RANK * (model.vocab + layout.tensor * model.hidden)
    factors = parts_of(dense * layers + ends, experts * layers, layout)
    return _all_reduced_s(factors, _FLOAT, layout, cluster, constants)


def _compressing_s(layout: Layout, software: Software, parts: tuple[Part, ...], rates: Rates) -> float:
    """Seconds in which gradients are made smaller and large again: they go through memory a few times."""
    passes = {"none": 0, "bfloat16": 1, "powersgd": _POWER_PASSES, "sign": _SIGN_PASSES}[layout.compression]
    if layout.compression == "bfloat16" and software.gradient_bytes <= 2:
        passes = 0
    flop = 6 * POWER_RANK * held(parts) if layout.compression == "powersgd" else 0.0
    return max(passes * held(parts) * software.gradient_bytes / rates.bytes_per_s, flop / rates.flop_per_s)


def _tied_s(of_embedding: int, layout: Layout, cluster: Cluster, software: Software, constants: Constants) -> float:
    """The first and the last stage have the same matrix, unless they are one."""
    if layout.pipeline == 1 or layout.schedule in FOLDED:
        return 0.0
    return all_reduce_s(
        of_embedding / layout.tensor * software.gradient_bytes,
        2,
        cluster.tiers,
        stride=layout.tensor * layout.context * layout.data * (layout.pipeline - 1),
        share=constants.link_share,
    )
