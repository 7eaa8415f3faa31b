"""Where a step goes, and in what two steps differ."""

from __future__ import annotations

import pytest
from tests.report.scale_builder import FIRST, FIRST_STEP, FOUND, SECOND, step

from flatout.core.records.scale import StepTime
from flatout.report.parts.reasons import STEP_PARTS, difference, num_alike, spent, where_it_goes


def test_every_field_of_a_step_is_a_part_and_parts_are_its_total() -> None:
    names = [name for name in StepTime.__struct_fields__ if name != "total_s"]
    counted = step(**{name: 1.5**i for i, name in enumerate(names)})
    assert sum(one.seconds for one in spent(counted)) == pytest.approx(counted.total_s)
    assert set(names) <= set(STEP_PARTS), "name and colour a new part"
    assert len({part.style for part in STEP_PARTS.values()}) == len(STEP_PARTS)


def test_the_largest_part_comes_first_and_nothing_goes_unsaid() -> None:
    assert where_it_goes(FIRST_STEP) == (
        "compute 67 %, tensor communication 17 %, bubble 11 %, data communication 2.2 %, update 2.2 %"
    )


def test_a_difference_is_told_by_its_parts() -> None:
    assert difference(SECOND.step, FIRST.step) == "data communication +1.70 s, bubble -1.00 s"
    assert difference(FIRST.step, SECOND.step) == "data communication -1.70 s, bubble +1.00 s"
    assert difference(FIRST.step, FIRST.step) == ""


def test_layouts_whose_intervals_meet_are_not_told_apart() -> None:
    assert num_alike(FOUND.best) == 2
    assert num_alike(FOUND.best[:1]) == 1
