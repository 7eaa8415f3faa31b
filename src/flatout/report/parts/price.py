"""What a layout costs, as text: seconds and where they go, memory by stage and kind, and what both follow from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from flatout.core.records.scale import Price, StageMemory
from flatout.report.document import Block, Column, Table, numbers
from flatout.report.parts.scale import STEP_PARTS, layout_text, prefixed
from flatout.scale.sizes import layer_spans

_KINDS = ("weight", "gradient", "state", "activation", "logits", "buffer", "slack", "feedback")
_GIB = 2**30


def price_blocks(price: Price, *, name: str, software: str) -> Iterator[Block]:
    """The whole report; `name` of the model, `software` in words."""
    layout, step, devices = price.layout, price.step, price.layout.num_devices
    device = PurePath(price.cluster.device).stem
    yield f"{name} on {devices} x {device}: {layout_text(layout)}"
    yield (
        f"a step takes {step.total_s:.3f} s ({price.low_s:.2f} - {price.high_s:.2f} s): {prefixed(price.tokens_per_s)} tokens a "
        f"second, {prefixed(price.tokens_per_s / devices)} on each device"
    )
    yield (
        f"MFU {price.mfu:.1%} with causal attention counted once, {price.mfu_whole:.1%} with attention counted whole (PaLM's "
        f"way); {price.hfu:.1%} with what is computed again"
    )
    rows = [
        [word, f"{seconds:.3f} s", f"{seconds / step.total_s:.1%}"]
        for part, word in STEP_PARTS
        if (seconds := getattr(step, part)) > 0
    ]
    yield Table([Column("where the step goes"), *numbers("time", "share")], rows, inset=0)
    yield _memory(price)
    fullest, room = price.fullest.total_bytes, price.room_bytes
    least = (fullest - price.fullest.slack_bytes) / _GIB
    verdict = "it fits"
    if not price.does_fit:
        verdict = "IT DOES NOT FIT" if price.is_too_large else "IT MAY NOT FIT"
    yield (
        f"{verdict}: the fullest device holds {least:.1f} GiB of tensors, up to {fullest / _GIB:.1f} GiB with what allocators "
        f"and libraries take, of {room / _GIB:.1f}"
    )
    yield "what this follows from:"
    yield f"   software: {software}"
    for assumption in price.assumptions:
        yield f"   {assumption}"


def _memory(price: Price) -> Table:
    """A row a stage, or one for stages that hold the same."""
    kinds = [kind for kind in _KINDS if any(_bytes(stage, kind) for stage in price.stages)]
    spans = layer_spans(price.model, price.layout)
    parts = price.layout.pipeline * price.layout.parts_per_stage
    rows: list[list[str]] = []
    shown: list[StageMemory] = []
    for number, stage in enumerate(price.stages):
        if shown and stage == shown[-1]:
            rows[-1][0] = f"{rows[-1][0].partition(' ')[0]} - {number}"
            continue
        shown.append(stage)
        sizes = [f"{_bytes(stage, kind) / _GIB:.1f}" for kind in kinds]
        rows.append([f"{number}", *sizes, f"{stage.total_bytes / _GIB:.1f}"])
    layers = sorted({last - first for first, last in spans})
    title = f"GiB by stage; {price.model.layers} layers in {parts} part{'s' * (parts > 1)} of {' or '.join(map(str, layers))}"
    return Table([Column("stage"), *numbers(*kinds, "total")], rows, inset=0, rest=[title])


def _bytes(stage: StageMemory, kind: str) -> int:
    return int(getattr(stage, f"{kind}_bytes"))
