"""What comes once a step: data ranks reduce gradients, the optimizer updates, and what it needs comes from where it was put."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.core.records.scale import FOLDED, Layout, ModelShape, Software
from flatout.machine.cost.collectives import all_reduce_s
from flatout.machine.cost.schedules import chunks_of_stages
from flatout.machine.cost.waves import Rates
from flatout.scale.case import StepCase
from flatout.scale.links import all_reduced_s, copies_of, gathered_s, is_sent_by_layer, scattered_s
from flatout.scale.rates import rates_of, started_s_of
from flatout.scale.sizes import (
    WeightPart,
    device_parameters,
    factor_parameters,
    layer_kinds,
    layer_spans,
    num_parameters,
    num_weights,
    sharded_parameters,
    stage_parameters,
    usual_kind,
    weight_parts,
)

POWER_RANK: Final = 4
"""Rank of PowerSGD's factors (Vogels et al., 2019, table 3: rank 4 for language models)."""
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


def update_time(case: StepCase, *, hidden_s: float, ahead_s: float, span_s: float) -> Update:
    """Seconds of the update on the stage with the most layers. What overlaps does so with the last backwards, `hidden_s`; the
    last layer's gradients are always left. Weights that are gathered ahead come beside the first forwards, `ahead_s`. What goes
    out to the host has the next step's forward and backward, `span_s`, to do so.

    Raises PlanError for an offload where the cluster does not say what joins devices and host.
    """
    model, layout, _, software, constants = case
    rates, layers = rates_of(case, case.product_dtype), most_layers(model, layout)
    of_stages = stage_parameters(model, layout)
    dense, experts = max(of_stages, key=lambda both: device_parameters(weight_parts(both[0], both[1], layout)))
    of_embedding = num_parameters(model)[1]
    embeddings = 1 if model.is_tied or (layout.pipeline > 1 and layout.schedule not in FOLDED) else 2
    parts = weight_parts(dense + of_embedding * embeddings, experts, layout)
    reduce_s = _reduced_s(parts, case) if layout.compression == "none" else _compressed_s(parts, case, layers)
    reduce_s *= software.trained_share
    late_s = 0.0
    if software.gathers_ahead and layout.compression == "none":
        gather_s = software.trained_share * _gathered_once_s(parts, case)
        reduce_s -= gather_s
        late_s = max(gather_s - ahead_s, gather_s / max(1.0, layers))
        late_s += constants.contention_share * min(gather_s, ahead_s)
    exposed_s = reduce_s
    if software.has_overlap:
        exposed_s = max(reduce_s - hidden_s, reduce_s / max(1.0, layers))
        exposed_s += constants.contention_share * min(reduce_s, hidden_s)
    exposed_s += late_s + _compressing_s(layout, software, parts, rates)
    exposed_s += _tied_s(of_embedding, case) if model.is_tied else 0.0
    updated = sharded_parameters(parts, layout) if layout.shard else device_parameters(parts)
    updated *= software.trained_share
    optimizer_s = updated * software.optimizer_bytes / rates.bytes_per_s
    offload_s = 0.0
    if layout.offload != "none":
        copy_s = copies_of(case)(updated * software.state_bytes)
        offload_s = copy_s + max(0.0, copy_s - span_s)
    return Update(exposed_s, optimizer_s, offload_s)


def started_once_s(case: StepCase) -> float:
    """Seconds of the host, once a step, for a stage's weights that are each handled by itself: they are gathered and their
    gradients reduced, where that is not done for each micro-batch, and they are updated, as tensors that are divided.
    """
    software, layout = case.software, case.layout
    if software.shards_by != "weight" or layout.data * layout.tensor == 1:
        return 0.0
    kinds = layer_kinds(case.model)
    weights = sum(num_weights(case.model, kind) for kind in kinds) / len(kinds) * most_layers(case.model, layout)
    exchanges = 0 if is_sent_by_layer(layout) or layout.data == 1 else 2
    return weights * (exchanges * started_s_of(case) + software.update_operators * case.constants.divided_operator_s)


def most_layers(model: ModelShape, layout: Layout) -> int:
    """Layers of the stage that has the most."""
    spans = layer_spans(model, layout)
    stages = chunks_of_stages(layout.schedule, stages=layout.pipeline, parts=layout.parts_per_stage)
    return max(sum(spans[chunk][1] - spans[chunk][0] for chunk in chunks) for chunks in stages)


def _reduced_s(parts: tuple[WeightPart, ...], case: StepCase) -> float:
    """What is sent once a step: all gradients, or their shards and the weights that come of them; among groups of shards too."""
    layout = case.layout
    if layout.shard == 0:
        return all_reduced_s(parts, case.software.gradient_bytes, case)
    if layout.shard == 3 and is_sent_by_layer(layout):
        return 0.0
    return _gathered_once_s(parts, case) + (0.0 if is_sent_by_layer(layout) else scattered_s(parts, case))


def _gathered_once_s(parts: tuple[WeightPart, ...], case: StepCase) -> float:
    """Seconds of what each step gathers of weights that came of sharded states."""
    layout = case.layout
    if layout.shard == 0 or (layout.shard == 3 and is_sent_by_layer(layout)):
        return 0.0
    return gathered_s(parts, case.gathered_width, case)


def _compressed_s(parts: tuple[WeightPart, ...], case: StepCase, layers: int) -> float:
    """Sent in half precision; as PowerSGD's two factors in float32; or as signs of a bit each, from each rank to all, since signs
    do not add up (EF-SignSGD, Karimireddy et al., 2019): a scale for each tensor is next to nothing."""
    model, layout = case.model, case.layout
    if layout.compression == "bfloat16":
        return all_reduced_s(parts, min(2, case.software.gradient_bytes), case)
    if layout.compression == "sign":  # gathering n of them is half an all-reduce of n times as much
        return all_reduced_s(parts, layout.context * layout.data / 16, case)
    dense, experts = factor_parameters(model, layout.tensor, usual_kind(model), rank=POWER_RANK)
    ends = POWER_RANK * (model.vocab + layout.tensor * model.hidden)
    factors = weight_parts(dense * layers + ends, experts * layers, layout)
    return all_reduced_s(factors, _FLOAT, case)


def _compressing_s(layout: Layout, software: Software, parts: tuple[WeightPart, ...], rates: Rates) -> float:
    """Seconds in which gradients are made smaller and large again: they go through memory a few times."""
    passes = {"none": 0, "bfloat16": 1, "powersgd": _POWER_PASSES, "sign": _SIGN_PASSES}[layout.compression]
    if layout.compression == "bfloat16" and software.gradient_bytes <= 2:
        passes = 0
    flop = 6 * POWER_RANK * device_parameters(parts) if layout.compression == "powersgd" else 0.0
    return max(passes * device_parameters(parts) * software.gradient_bytes / rates.bytes_per_s, flop / rates.flop_per_s)


def _tied_s(of_embedding: int, case: StepCase) -> float:
    """The first and the last stage have the same matrix, unless they are one."""
    layout = case.layout
    if layout.pipeline == 1 or layout.schedule in FOLDED:
        return 0.0
    num_bytes = of_embedding / layout.tensor * case.software.gradient_bytes
    stride = layout.tensor * layout.context * layout.data * (layout.pipeline - 1)
    return all_reduce_s(num_bytes, 2, case.tiers, stride=stride)
