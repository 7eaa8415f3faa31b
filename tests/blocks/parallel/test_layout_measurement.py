"""Layouts measured in rounds: the means of what was measured, and an end in time."""

from __future__ import annotations

import pytest

from flatout.blocks.parallel import layout_measurement
from flatout.blocks.parallel.layout_measurement import averaged, measured_in_rounds
from flatout.blocks.parallel.world import World
from flatout.core.records.scale import Layout, MeasuredStep, ModelShape

SHAPE = ModelShape(hidden=16, layers=1, heads=2, vocab=32, seq=8)
PLAIN, AGAIN, TOO_MANY = Layout(), Layout(recompute="full"), Layout(tensor=2)


def step(
    layout: Layout, seconds: float | None, host_layer_s: float | None = None, peak: int | None = None
) -> MeasuredStep:
    peaks = None if peak is None else (peak,)
    return MeasuredStep(model=SHAPE, layout=layout, seconds=seconds, host_layer_s=host_layer_s, peak_bytes=peaks)


def test_rounds_are_averaged_by_layout() -> None:
    refused = MeasuredStep(model=SHAPE, layout=TOO_MANY, why="two ranks are needed")
    first = [step(PLAIN, 1.0, 1e-5, 100), step(AGAIN, 2.0, 1e-5, 50), refused]
    second = [step(PLAIN, 3.0, 3e-5, 120)]  # the second round was cut off by the limit
    found = averaged([first, second])
    assert [one.layout for one in found] == [PLAIN, AGAIN, TOO_MANY]
    assert (found[0].seconds, found[0].host_layer_s, found[0].peak_bytes) == (2.0, pytest.approx(2e-5), (120,))
    assert found[1] == first[1]
    assert found[2].why == "two ranks are needed"


def test_a_layout_that_ran_once_has_the_seconds_of_that_round() -> None:
    failed = MeasuredStep(model=SHAPE, layout=PLAIN, why="out of memory")
    assert averaged([[step(PLAIN, 1.5)], [failed]])[0].seconds == 1.5


def test_all_layouts_are_measured_again_while_there_is_time() -> None:
    with World("cpu") as world:
        found = list(measured_in_rounds([(SHAPE, PLAIN), (SHAPE, AGAIN)], world, limit_s=60.0, rounds=2, mixed=None))
    assert [one.layout for one, _ in found] == [PLAIN, AGAIN, PLAIN, AGAIN]
    assert all(one.host_layer_s for one, _ in found)
    last = found[-1][1]
    assert len(last) == 2
    of_plain = [one.seconds for one, _ in found if one.layout == PLAIN]
    assert last[0].seconds == pytest.approx(sum(of_plain) / 2)


def test_a_round_that_began_late_is_not_begun() -> None:
    with World("cpu") as world:
        found = list(measured_in_rounds([(SHAPE, PLAIN)], world, limit_s=1e-9, rounds=3, mixed=None))
    assert len(found) <= 1


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ([4.0, 4.1, 3.9, 7.0, 4.0, 4.2], [4.0, 4.1, 3.9, 4.0, 4.2]),  # disturbed once: measured again
        ([4.0, 4.1, 3.9, 7.0, 6.0, 6.5, 4.2], [4.0, 4.1, 3.9, 6.0, 4.2]),  # three times: the least disturbed counts
        ([7.0, 4.0, 4.1, 4.0, 4.2], [7.0, 4.0, 4.1, 4.0, 4.2]),  # what is usual is not known yet
        ([4.0, 4.1, 3.9, 4.6, 3.0], [4.0, 4.1, 3.9, 4.6, 3.0]),  # within what hosts vary
    ],
)
def test_a_step_beside_which_the_host_was_disturbed_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], kept: list[float]
) -> None:
    taken = iter(speeds)

    def measured(_shape: ModelShape, layout: Layout, *_: object) -> MeasuredStep:
        host_layer_s = next(taken)
        return step(layout, 10 * host_layer_s, host_layer_s)

    monkeypatch.setattr(layout_measurement, "_measured", measured)
    with World("cpu") as world:
        found = list(layout_measurement.measured_steps([(SHAPE, PLAIN)] * len(kept), world, limit_s=60.0))
    assert [one.host_layer_s for one in found] == kept
    assert [one.seconds for one in found] == [10 * host_layer_s for host_layer_s in kept]
    assert next(taken, None) is None
