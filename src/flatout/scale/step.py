"""How long a step of a transformer takes under a layout, from the work of its layers, the links, and the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from flatout.core.records.scale import (
    LOOPED,
    SPLIT,
    Cluster,
    Constants,
    Layout,
    ModelShape,
    ScheduleKind,
    Software,
    StepTime,
)
from flatout.machine.cost.collectives import send_s
from flatout.machine.cost.schedules import Done, chunks_of_stages, schedule_table, simulated_schedule
from flatout.machine.cost.spans import table_span_s
from flatout.machine.cost.waiting import expected_largest
from flatout.scale.case import StepCase
from flatout.scale.layers import NOTHING, LayerPass, works
from flatout.scale.rules import require_possible
from flatout.scale.sizes import extra_kinds, kinds_between, layer_spans
from flatout.scale.update import started_once_s, update_time

_BUBBLES: Final[Mapping[ScheduleKind, float]] = {"zero-bubble": 1 / 3, "zbv": 0.1, "dualpipev": 0.25}
"""Of 1F1B's bubble, where F, I and W take equally long: what is left of it (Qi et al., 2023, table 1; DeepSeek-V3, 2024, table 2,
whose (p / 2 - 1) (FB + B - 3 W) is this much for 2 p half stages). Only to choose what is played."""


class _Priced(NamedTuple):
    """What each chunk takes, by kind of action, and where it lies."""

    of_chunks: dict[tuple[str, int], LayerPass]
    stages: tuple[tuple[int, ...], ...]

    def passes(self, stage: int, kinds: str) -> list[LayerPass]:
        """Passes of all chunks of a stage."""
        return [self.of_chunks[kind, chunk] for chunk in self.stages[stage] for kind in kinds]


def step_time(
    model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> StepTime:
    """Seconds of one step and what they are made of.

    Raises PlanError when the layout does not fit the model or the cluster, HardwareError when the device's data sheet lacks a
    figure.
    """
    case = StepCase(model, layout, cluster, software, constants)
    priced = _priced(case)
    micro = layout.num_micro_batches
    busiest = max((priced.passes(s, "FB") for s in range(layout.pipeline)), key=_taken_s)
    pipeline_s = micro * _taken_s(busiest)
    if layout.pipeline > 1:
        pipeline_s = table_span_s(
            layout.schedule,
            {key: one.total_s for key, one in priced.of_chunks.items()},
            stages=layout.pipeline,
            micro_batches=micro,
            chunks=layout.parts_per_stage,
            send_s=_hop_s(case),
        )
    hidden_s, ahead_s = _hiding_s(priced, layout)
    compute_s = micro * sum(p.device_s for p in busiest)
    bubble_s = max(0.0, pipeline_s - micro * _taken_s(busiest))
    update = update_time(case, hidden_s=hidden_s, ahead_s=ahead_s, span_s=pipeline_s)
    straggler_s = constants.straggler_share * expected_largest(layout.num_devices) * (compute_s + bubble_s)
    host_s = micro * sum(p.own_s - (p.device_s + p.tensor_s + p.context_s + p.expert_s) for p in busiest)
    # what the host starts once a step comes behind all micro-batches, as far as it is not ahead of the device by then
    once_s = max(0.0, started_once_s(case) - micro * sum(p.total_s - p.host_s for p in busiest))
    host_s += once_s
    pipeline_s += once_s
    return StepTime(
        total_s=pipeline_s + update.data_s + update.optimizer_s + update.offload_s + constants.step_s + straggler_s,
        compute_s=compute_s,
        host_s=host_s,
        tensor_s=micro * sum(p.tensor_s for p in busiest),
        bubble_s=bubble_s,
        data_s=update.data_s + micro * sum(p.sending_s for p in busiest),
        optimizer_s=update.optimizer_s,
        step_s=constants.step_s,
        context_s=micro * sum(p.context_s for p in busiest),
        expert_s=micro * sum(p.expert_s for p in busiest),
        offload_s=update.offload_s + micro * sum(p.copying_s for p in busiest),
        straggler_s=straggler_s,
    )


def timeline(
    model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants
) -> tuple[tuple[Done, ...], ...]:
    """When each stage does what, from the first forward to the last backward; () for a single stage.

    Raises as `step_time` does.
    """
    case = StepCase(model, layout, cluster, software, constants)
    priced = _priced(case)
    if layout.pipeline == 1:
        return ()
    parts = layout.parts_per_stage
    micro = layout.num_micro_batches
    table = schedule_table(layout.schedule, stages=layout.pipeline, micro_batches=micro, chunks=parts)
    return simulated_schedule(
        table,
        seconds=lambda action: priced.of_chunks[action.kind, action.chunk].total_s,
        send_s=_hop_s(case),
        chunks=parts,
    )


class QuickTime(NamedTuple):
    """Seconds of a step without playing its schedule: about what they are, and what they are at least."""

    about_s: float
    least_s: float


def quick_s(model: ModelShape, layout: Layout, cluster: Cluster, software: Software, constants: Constants) -> QuickTime:
    """About what `step_time` says, without playing the schedule: its bubble is (p - 1) / v of a stage's micro-batch, or as much
    less as schedules with split backwards claim. Without any bubble it is less than a step can be.

    Raises as `step_time` does.
    """
    case = StepCase(model, layout, cluster, software, constants)
    priced = _priced(case)
    most_s = max(_taken_s(priced.passes(s, "FB")) for s in range(layout.pipeline))
    hidden_s, ahead_s = _hiding_s(priced, layout)
    hop_s = _hop_s(case)
    bubble = (layout.pipeline - 1) / layout.chunks * _BUBBLES.get(layout.schedule, 1.0)
    span_s = (layout.num_micro_batches + bubble) * most_s + 2 * (layout.pipeline - 1) * hop_s
    update = update_time(case, hidden_s=hidden_s, ahead_s=ahead_s, span_s=span_s)
    once_s = update.data_s + update.optimizer_s + constants.step_s
    return QuickTime(span_s + once_s + update.offload_s, layout.num_micro_batches * most_s + once_s)


def _hiding_s(priced: _Priced, layout: Layout) -> tuple[float, float]:
    """Seconds of backwards that go on when gradients of the first chunk are whole, and of forwards before weights of the last are
    needed, on the stage with the least.

    Without chunks they are those of one micro-batch. A stage with v chunks goes through p micro-batches of each chunk in turn
    (Narayanan et al., 2021, section 2.2): gradients of a chunk are whole when so many of each other chunk are still to come.
    """
    rounds = 1.0
    if layout.schedule in LOOPED and layout.chunks > 1:
        each = min(layout.pipeline, layout.num_micro_batches)
        rounds = max(1.0, each * (layout.chunks - 1) / layout.chunks)
    backward_s, forward_s = (
        rounds * min(sum(p.own_s for p in priced.passes(s, kind)) for s in range(layout.pipeline)) for kind in "BF"
    )
    return backward_s, forward_s


def _taken_s(passes: Sequence[LayerPass]) -> float:
    return sum(p.total_s for p in passes)


def _priced(case: StepCase) -> _Priced:
    """The first chunk has the embedding, the last the head. A backward in two parts takes what they take together."""
    model, layout = case.model, case.layout
    require_possible(model, layout, case.cluster.num_devices)
    found = works(case)
    stages = chunks_of_stages(layout.schedule, stages=layout.pipeline, parts=layout.parts_per_stage)
    spans = layer_spans(model, layout)
    kinds_of = [kinds_between(model, first, last) for first, last in spans]
    last = len(spans) - 1
    of_chunks: dict[tuple[str, int], LayerPass] = {}
    for kind in "FBIW" if layout.schedule in SPLIT else "FB":
        ends = found.embedding.of(kind), found.head.of(kind)
        if model.extra_tokens:
            further = found.of_layers(((one, 1) for one in extra_kinds(model)), kind) + found.joining.of(kind) + ends[1]
            ends = ends[0], ends[1] + further.times(model.extra_tokens)
        by_kinds = {kinds: found.of_layers(kinds, kind) for kinds in set(kinds_of)}
        for chunk, kinds in enumerate(kinds_of):
            own = by_kinds[kinds]
            own = own + ends[1] if chunk == last else own
            of_chunks[kind, chunk] = own + ends[0] if chunk == 0 and ends[0] != NOTHING else own
    return _Priced(of_chunks, stages)


def _hop_s(case: StepCase) -> float:
    """Seconds of a micro-batch from one stage to the next: each tensor rank sends its tokens, where these are divided, or all."""
    layout = case.layout
    ranks = layout.tensor if layout.is_sequence_parallel else 1
    num_bytes = case.tokens * case.model.hidden * case.width / ranks
    stride = layout.tensor * layout.context * layout.data
    return send_s(num_bytes, case.tiers, stride=stride)
