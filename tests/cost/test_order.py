from __future__ import annotations

from math import pi, sqrt
from random import Random

import pytest

from flatout.cost.order import expected_largest


def test_the_largest_of_few_is_known_in_closed_form() -> None:
    assert expected_largest(1) == pytest.approx(0, abs=1e-9)
    assert expected_largest(2) == pytest.approx(1 / sqrt(pi))
    assert expected_largest(3) == pytest.approx(1.5 / sqrt(pi))


def test_the_largest_of_many_is_what_drawing_gives() -> None:
    rng = Random(0)
    drawn = [max(rng.gauss(0, 1) for _ in range(64)) for _ in range(4000)]
    assert expected_largest(64) == pytest.approx(sum(drawn) / len(drawn), abs=0.03)
    assert expected_largest(16384) > expected_largest(1024) > expected_largest(64)
