"""Spaces: what is in them, what was not tried yet."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.core.errors import UsageError
from flatout.shrink.search.space import Range, architecture_key, checked_space, distributions, untried


def test_choices_that_were_not_tried_are_found_until_there_is_none() -> None:
    space = {"width": Range(4, 12, 4), "kind": ["a", "b"]}
    tried: set[str] = set()
    while (architecture := untried(space, tried, seed=len(tried))) is not None:
        assert architecture_key(architecture) not in tried
        tried.add(architecture_key(architecture))
    assert len(tried) == 6


def test_a_space_without_end_has_always_another_choice() -> None:
    space = {"rate": Range(0.1, 0.2)}
    assert untried(space, set(), seed=0) != untried(space, set(), seed=1)


def test_optuna_is_given_the_same_space() -> None:
    found = distributions({"w": Range(4, 13, 4), "r": Range(1e-3, 1.0, log=True), "k": [1, 3]})
    assert (found["w"].low, found["w"].high, found["w"].step) == (4, 12, 4)
    assert found["r"].log and found["k"].choices == (1, 3)


@pytest.mark.parametrize(
    "space",
    [
        {},
        {"a": []},
        {"a": [1, 1]},
        {"a": "abc"},
        {"a": Range(2, 1)},
        {"a": Range(0, 1, log=True)},
        {"a": Range(1, 2, 0)},
    ],
)
def test_empty_spaces_are_refused(space: Any) -> None:
    with pytest.raises(UsageError):
        checked_space(space)
