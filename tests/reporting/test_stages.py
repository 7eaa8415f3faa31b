"""Memory of stages in text: bars in proportion, the limit where it is, what does not fit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reporting.scale_builder import GIB, STAGES, memory

from flatout.records.scale import StageMemory
from flatout.reporting.stages import PARTS, fullest, held, stage_lines


def bars(lines: list[str]) -> list[str]:
    """What is drawn of each stage."""
    return [line[9:] for line in lines if line.startswith("stage ")]


def test_every_field_of_a_stages_total_has_a_part() -> None:
    """A field that is added to the record must be drawn, or bars would be too short."""
    counted = StageMemory(**{name: 1 << i for i, name in enumerate(StageMemory.__struct_fields__)})
    assert sum(size for _, size in held(counted)) == counted.total_bytes, "name, letter and colour a new part"
    assert len({part.letter for part in PARTS.values()}) == len({part.style for part in PARTS.values()}) == len(PARTS)


@given(
    st.lists(st.tuples(*(st.floats(0, 50) for _ in range(3))), min_size=1, max_size=6),
    st.none() | st.floats(1, 200),
)
def test_bars_are_as_long_as_their_bytes(sizes: list[tuple[float, float, float]], room: float | None) -> None:
    stages = [memory(weights, activations, logits) for weights, activations, logits in sizes]
    room_bytes = None if room is None else room * GIB
    scale = 60 / max(room_bytes or 0, *(stage.total_bytes for stage in stages), 0)
    for stage, bar in zip(stages, bars(list(stage_lines(stages, room_bytes=room_bytes))), strict=True):
        drawn = bar[: 60 + (room is not None)].replace("|", "").rstrip()
        assert len(drawn) == pytest.approx(stage.total_bytes * scale, abs=0.51)
        assert drawn.count("a") == pytest.approx(stage.activation_bytes * scale, abs=1.01)
        if room_bytes is not None:
            assert bar.index("|") == round(room_bytes * scale)
            assert ("TOO LARGE" in bar) == (stage.total_bytes > room_bytes)


def test_stages_in_the_middle_are_left_out_but_never_the_fullest() -> None:
    stages = [memory(activations=60 if at == 20 else 30) for at in range(40)]
    lines = list(stage_lines(stages, room_bytes=80 * GIB))
    assert fullest(stages) == 20
    assert any(line.startswith("stage 20 ") and "TOO LARGE" in line for line in lines)
    assert [line for line in lines if line.startswith("...")] == [
        "...      12 stages between",
        "...      11 stages between",
    ]
    assert max(map(len, lines)) <= 100


def test_what_lies_on_the_host_is_no_part_of_the_bar_and_is_told() -> None:
    offloaded = msgspec.structs.replace(memory(), host_bytes=100 * GIB)
    assert bars(list(stage_lines([offloaded], room_bytes=None))) == bars(list(stage_lines([memory()], room_bytes=None)))
    *_, last = stage_lines([memory(), offloaded], room_bytes=80 * GIB)
    assert last == "besides, up to 100 GiB of a device lie in the host's memory or on its disk"


def test_golden(golden: Callable[[str, str], None]) -> None:
    texts = [*stage_lines(STAGES, room_bytes=80 * GIB), "", *stage_lines(STAGES, room_bytes=60 * GIB), ""]
    golden("stages", "\n".join([*texts, *stage_lines(STAGES[:1], room_bytes=None)]) + "\n")
