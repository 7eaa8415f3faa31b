from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.core.records.shrink import Point
from flatout.shrink.compose.ranking import best, is_gain, pareto_names


def point(name: str, *, s: float = 1.0, num_bytes: int = 100, lost: float = 0.0, width: float = 0.01) -> Point:
    """A point beside one that takes a second; `width` is the half interval of its speed-up, relative."""
    ratio = 1 / s
    return Point(
        name=name,
        call_s=(s, s, s),
        faster=(ratio, ratio * (1 - width), ratio * (1 + width)),
        num_pairs=11,
        num_bytes=num_bytes,
        metric=0.9 - lost,
        lost=lost,
    )


ORIGINAL = point("as it is")

points = st.lists(
    st.builds(
        point,
        st.just(""),
        s=st.floats(0.1, 10),
        num_bytes=st.integers(1, 1000),
        lost=st.floats(-0.1, 0.5),
        width=st.floats(0, 0.5),
    ),
    min_size=1,
    max_size=12,
).map(
    lambda found: [
        ORIGINAL,
        *(Point(**{f: getattr(p, f) for f in p.__struct_fields__} | {"name": str(i)}) for i, p in enumerate(found)),
    ]
)


@pytest.mark.slow
@given(points)
@settings(max_examples=200, deadline=None)
def test_no_point_outside_of_the_front_is_unbeaten_and_none_in_it_is_beaten(found: list[Point]) -> None:
    remaining = set(pareto_names(found))
    assert remaining
    for p in found:
        costs = (p.call_s[0], p.num_bytes, p.lost)
        beaten = any(
            all(x <= y for x, y in zip((q.call_s[0], q.num_bytes, q.lost), costs, strict=True))
            and (q.call_s[0], q.num_bytes, q.lost) != costs
            for q in found
        )
        assert (p.name in remaining) != beaten


@pytest.mark.slow
@given(points, st.sampled_from(["latency", "memory"]), st.floats(0, 0.3))
@settings(max_examples=200, deadline=None)
def test_the_best_keeps_the_metric_and_is_never_slower_than_the_given_model(
    found: list[Point], objective: str, allowed: float
) -> None:
    selected, because = best(found, objective, allowed)  # type: ignore[arg-type]
    assert because
    if selected is not found[0]:
        assert selected.lost <= allowed
        assert selected.faster[2] >= 1
        assert is_gain(selected, found[0], objective)  # type: ignore[arg-type]


def test_a_faster_point_whose_interval_reaches_below_one_is_not_chosen() -> None:
    assert best([ORIGINAL, point("unsure", s=0.9, width=0.2)], "latency", 0.1)[0] is ORIGINAL


def test_a_metric_that_is_not_a_number_is_never_within_what_is_allowed() -> None:
    assert best([ORIGINAL, point("broken", s=0.1, lost=float("nan"))], "latency", 1.0)[0] is ORIGINAL


def test_fewer_bytes_are_chosen_for_memory_and_less_time_for_latency() -> None:
    found = [ORIGINAL, point("small", s=0.9, num_bytes=10), point("fast", s=0.1, num_bytes=90)]
    assert best(found, "memory", 0)[0].name == "small"
    assert best(found, "latency", 0)[0].name == "fast"


def test_fewer_bytes_that_make_it_slower_are_not_chosen_for_memory() -> None:
    assert best([ORIGINAL, point("small", s=2.0, num_bytes=10)], "memory", 0)[0] is ORIGINAL
