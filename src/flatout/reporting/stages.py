"""What each stage of a layout holds, in text: a bar a stage against the memory that a device has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from flatout.records.scale import StageMemory
from flatout.reporting import units
from flatout.reporting.pipeline import shown

_WIDTH: Final = 60


class Part(NamedTuple):
    """How one part of the memory is named and drawn: in text by a letter, on a page by a class of its style."""

    label: str
    letter: str
    style: str


PARTS: Final[Mapping[str, Part]] = {
    "weight_bytes": Part("weights", "w", "mem-parameters"),
    "gradient_bytes": Part("gradients", "g", "mem-gradients"),
    "state_bytes": Part("optimizer state", "s", "mem-optimizer-state"),
    "activation_bytes": Part("activations", "a", "mem-activations"),
    "logits_bytes": Part("logits", "l", "mem-temporaries"),
    "buffer_bytes": Part("buffers", "b", "mem-batch"),
    "feedback_bytes": Part("compression's rest", "c", "mem-kept"),
    "slack_bytes": Part("slack", "-", "mem-cached"),
}
"""By the field of StageMemory that lies on the device, in the order in which they are drawn."""


def held(memory: StageMemory) -> list[tuple[Part, int]]:
    """The parts that take anything."""
    return [(part, getattr(memory, name)) for name, part in PARTS.items() if getattr(memory, name)]


def fullest(stages: Sequence[StageMemory]) -> int:
    """The stage that holds the most."""
    return max(range(len(stages)), key=lambda stage: stages[stage].total_bytes)


def stage_lines(stages: Sequence[StageMemory], *, room_bytes: float | None) -> Iterator[str]:
    """A heading and a bar a stage, at most 100 columns wide; '|' is the end of the room, where that is known."""
    most = max(stage.total_bytes for stage in stages)
    scale = _WIDTH / max(most, room_bytes or 0.0)
    found = {part.letter: part.label for stage in stages for part, _ in held(stage)}
    letters = [f"{part.letter} {part.label}" for part in PARTS.values() if part.letter in found]
    yield f"a device of each stage: {', '.join(letters)}"
    if room_bytes is not None:
        yield f"{'':9}| is the {units.size(room_bytes)} that a device has"
    before = -1
    for stage in shown(len(stages), besides=fullest(stages)):
        if stage != before + 1:
            yield f"{'...':9}{stage - before - 1} stages between"
        yield f"{f'stage {stage}':9}{_bar(stages[stage], scale, room_bytes)}  {_said(stages[stage], room_bytes)}"
        before = stage
    if outside := max(stage.host_bytes for stage in stages):
        yield f"besides, up to {units.size(outside)} of a device lie in the host's memory or on its disk"


def _bar(memory: StageMemory, scale: float, room_bytes: float | None) -> str:
    """Ends of parts are rounded, so that the bar is as long as the sum."""
    bar, end = "", 0.0
    for part, size in held(memory):
        end += size * scale
        bar += part.letter * (round(end) - len(bar))
    if room_bytes is None:
        return f"{bar:{_WIDTH}}"
    limit = round(room_bytes * scale)
    return f"{bar[:limit]:{limit}}|{bar[limit:]:{_WIDTH - limit}}"


def _said(memory: StageMemory, room_bytes: float | None) -> str:
    total = f"{units.size(memory.total_bytes):>9}"
    if room_bytes is None:
        return total
    return f"{total} {'TOO LARGE' if memory.total_bytes > room_bytes else units.percent(memory.total_bytes / room_bytes):>9}"
