"""What is measured for a calibration: every kind of division, at two depths, and nothing that does not fit."""

from __future__ import annotations

import pytest

from flatout.core.records.scale import ModelShape, Software
from flatout.scale.calibration_steps import calibration_steps
from flatout.scale.memory import memory_of


def model(layers: int, hidden: int = 64) -> ModelShape:
    return ModelShape(hidden=hidden, layers=layers, heads=8, vocab=128, seq=64)


@pytest.mark.parametrize(
    ("layers", "devices", "depths"),
    [(24, 1, {4, 12}), (24, 4, {8, 24}), (24, 8, {16}), (8, 1, {4, 8}), (5, 1, {4}), (2, 1, {2}), (96, 8, {16, 48})],
)
def test_layers_are_few_and_up_to_three_times_as_many(layers: int, devices: int, depths: set[int]) -> None:
    steps = calibration_steps(model(layers), devices, Software(), None)
    assert {shape.layers for shape, _ in steps} == depths
    assert all(shape.layers % layout.pipeline == 0 for shape, layout in steps)


def test_each_kind_of_division_comes_first_at_both_depths() -> None:
    steps = calibration_steps(model(24), 4, Software(), None)
    kinds = {(x.tensor, x.pipeline, x.data) for _, x in steps}
    firsts = {(shape.layers, x.tensor, x.pipeline, x.data) for shape, x in steps[: 4 * len(kinds)]}
    assert firsts == {(depth, *kind) for depth in (8, 24) for kind in kinds}


def test_what_does_not_fit_is_left_out() -> None:
    shape, software = model(12, hidden=512), Software()
    whole = calibration_steps(shape, 2, software, None)
    peaks = [max(stage.total_bytes for stage in memory_of(one, layout, software)) for one, layout in whole]
    room = max(peaks)
    few = calibration_steps(shape, 2, software, room)
    assert 0 < len(few) < len(whole)
    assert all(max(stage.total_bytes for stage in memory_of(*one, software)) <= room for one in few)
