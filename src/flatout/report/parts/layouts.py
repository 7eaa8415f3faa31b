"""A layout in sentences, for those who do not read `tensor 4, pipeline 4x4` yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flatout.core import units
from flatout.core.records.scale import Layout, ModelShape, ScheduleKind
from flatout.scale.sizes import layer_spans

_SCHEDULES: Final[dict[ScheduleKind, str]] = {
    "gpipe": "GPipe: all forwards, then all backwards",
    "1f1b": "1F1B: a forward, a backward, in turn",
    "interleaved": "interleaved 1F1B",
    "looped-bfs": "looped, breadth first",
    "zero-bubble": "interleaved zero bubble: gradients of weights wait until a stage would",
    "zbv": "zero bubble in a V: each stage has a part of the way down and one of the way back",
    "dualpipev": "DualPipeV: forwards and backwards of two parts overlap",
}
_SHARDS: Final = {
    0: "each holds all of the state",
    1: "the optimizer's state is divided among them (ZeRO-1)",
    2: "the optimizer's state and gradients are divided among them (ZeRO-2)",
    3: "weights, gradients and the optimizer's state are divided among them (FSDP, ZeRO-3)",
}
_RECOMPUTE: Final = {
    "none": "Nothing: all activations are kept for the backward.",
    "parts": "The parts that are named, in the backward.",
    "operators": "What lies between products and every other product, in the backward.",
    "selective": "Attention, in the backward; all other activations are kept.",
    "full": "Each layer, in the backward; only its input is kept.",
}


class Term(NamedTuple):
    """One way to divide the work, and what it means here."""

    term: str
    meaning: str


def layout_words(layout: Layout, model: ModelShape) -> Iterator[Term]:
    """What is divided over what, the nearest devices first.

    >>> model = ModelShape(hidden=64, layers=8, heads=4, vocab=99, seq=32)
    >>> next(layout_words(Layout(pipeline=2, data=4, global_batch=16), model))
    Term(term='pipeline 2', meaning='The 8 layers lie in 2 stages of 4 layers; 1F1B: a forward, a backward, in turn.')
    """
    if layout.tensor > 1:
        between = "; what lies between its products is divided by tokens" if layout.is_sequence_parallel else ""
        yield Term(
            f"tensor {layout.tensor}", f"Each layer is divided over {layout.tensor} neighbouring devices{between}."
        )
    if layout.context > 1:
        yield Term(f"context {layout.context}", f"Each sample is divided by tokens over {layout.context} devices.")
    if layout.pipeline > 1:
        yield Term(f"pipeline {layout.pipeline}", _stages(layout, model))
    yield Term(f"data {layout.data}", _copies(layout))
    if layout.expert > 1:
        yield Term(
            f"expert {layout.expert}",
            f"The {model.num_experts} experts of a layer lie on {layout.expert} ranks.",
        )
    yield Term("recomputed", _RECOMPUTE[layout.recompute])
    if layout.offload != "none":
        what = "The optimizer's state lies" if layout.offload == "state" else "Weights and the optimizer's state lie"
        where = "the host's memory" if layout.offload_to == "host" else "the host's disk"
        yield Term("offloaded", f"{what} in {where}.")
    if layout.compression != "none":
        yield Term("compressed", f"Gradients between copies, by {layout.compression}.")


def _stages(layout: Layout, model: ModelShape) -> str:
    parts = layout.parts_per_stage
    layers = _span([last - first for first, last in layer_spans(model, layout)])
    of_parts = f"{parts} parts, each of {layers}" if parts > 1 else layers
    return f"The {model.layers} layers lie in {layout.pipeline} stages of {of_parts}; {_SCHEDULES[layout.schedule]}."


def _copies(layout: Layout) -> str:
    samples = f"{layout.num_micro_batches} x {units.counted(layout.micro_batch, 'sample')}"
    if layout.data == 1:
        return f"One copy of the model, {samples} a step."
    among = f", in groups of {layout.shard_ranks}" if layout.shard_ranks and layout.shard else ""
    return f"{layout.data} copies, each {samples} a step; {_SHARDS[layout.shard]}{among}."


def _span(numbers: Sequence[int]) -> str:
    """'4 layers', or '4 - 5 layers'."""
    low, high = min(numbers), max(numbers)
    return units.counted(low, "layer") if low == high else f"{low} - {high} layers"
