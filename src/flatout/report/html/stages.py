"""Stacked bars as lists of lengths, for a template that draws them: memory of stages, and parts of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flatout.core import units
from flatout.core.records.scale import Ranked, StageMemory
from flatout.report.html.bars import Bar, Chart, Piece
from flatout.report.html.pipeline import shown
from flatout.report.parts.reasons import StepPart, spent, where_it_goes
from flatout.report.parts.scale import layout_text

PARTS: Final[Mapping[str, StepPart]] = {
    "weight_bytes": StepPart("weights", "mem-parameters"),
    "gradient_bytes": StepPart("gradients", "mem-gradients"),
    "state_bytes": StepPart("optimizer state", "mem-optimizer-state"),
    "activation_bytes": StepPart("activations", "mem-activations"),
    "logits_bytes": StepPart("logits", "mem-temporaries"),
    "buffer_bytes": StepPart("buffers", "mem-batch"),
    "feedback_bytes": StepPart("compression's rest", "mem-kept"),
    "slack_bytes": StepPart("slack", "mem-cached"),
}
"""By the field of StageMemory that lies on the device, in the order in which they are drawn."""


def part_sizes(memory: StageMemory) -> list[tuple[StepPart, int]]:
    """The parts that take anything."""
    return [(part, getattr(memory, name)) for name, part in PARTS.items() if getattr(memory, name)]


def fullest(stages: Sequence[StageMemory]) -> int:
    """The stage that holds the most."""
    return max(range(len(stages)), key=lambda stage: stages[stage].total_bytes)


def memory_chart(stages: Sequence[StageMemory], *, room_bytes: float | None) -> Chart:
    """A bar a stage, all on one scale that holds the limit too."""
    most = max([room_bytes or 0.0, *(stage.total_bytes for stage in stages)]) * 1.02
    at = shown(len(stages), besides=fullest(stages))
    names = [f"stage {stage}" if len(stages) > 1 else "fullest" for stage in at]
    bars = [
        _of_stage(stages[stage], name, most, room_bytes, num_before=stage - before - 1)
        for before, stage, name in zip((-1, *at), at, names, strict=False)
    ]
    used = {part.label for stage in stages for part, _ in part_sizes(stage)}
    legend = tuple((part.style, part.label) for part in PARTS.values() if part.label in used)
    return Chart(tuple(bars), legend, None if room_bytes is None else room_bytes / most)


def step_chart(ranked: Sequence[Ranked]) -> Chart:
    """A bar a layout, as long as its step, with its interval."""
    longest_s = max(one.high_s for one in ranked)
    bars = tuple(_of_step(place, one, longest_s) for place, one in enumerate(ranked, start=1))
    used = {
        s.part.label: s.part.style for one in ranked for s in spent(one.step) if s.seconds >= 0.0005 * one.step.total_s
    }
    order = [s.part for s in spent(ranked[0].step)]
    return Chart(bars, tuple((part.style, part.label) for part in order if part.label in used))


def _of_stage(memory: StageMemory, name: str, most: float, room_bytes: float | None, *, num_before: int) -> Bar:
    total = memory.total_bytes
    is_over = room_bytes is not None and total > room_bytes
    shares = ", ".join(f"{part.label} {units.size(size)}" for part, size in part_sizes(memory))
    of = "" if room_bytes is None else f" of {units.size(room_bytes)}{', too large' if is_over else ''}"
    return Bar(
        name=name,
        value=units.size(total),
        pieces=tuple(_piece(part, units.size(size), size / total) for part, size in part_sizes(memory)),
        fraction=total / most,
        label=f"{name}: {units.size(total)}{of}: {shares}",
        remark="" if room_bytes is None else "too large" if is_over else units.percent(total / room_bytes),
        is_over=is_over,
        num_before=num_before,
    )


def _of_step(place: int, one: Ranked, longest_s: float) -> Bar:
    total_s = one.step.total_s
    return Bar(
        name=f"{place}. {layout_text(one.layout)}",
        value=units.duration(total_s),
        pieces=tuple(
            _piece(s.part, units.duration(s.seconds), s.seconds / total_s) for s in spent(one.step) if s.seconds > 0
        ),
        fraction=total_s / longest_s,
        label=f"layout {place}: {units.duration(total_s)}: {where_it_goes(one.step)}",
        interval=(one.low_s / longest_s, one.high_s / longest_s),
    )


def _piece(part: StepPart, shown_size: str, fraction: float) -> Piece:
    return Piece(part.style, f"{part.label}: {shown_size}, {units.percent(fraction)}", fraction)
