"""Numbers as people read them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core import units

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}


def read(shown: str, names: dict[str, float]) -> float:
    value, name = shown.split(" ")
    return float(value) * names[name]


def significant(shown: str) -> int:
    return len(re.sub(r"\D", "", shown.partition(" ")[0]).lstrip("0"))


@given(st.floats(min_value=1e-8, max_value=900))
def test_a_duration_reads_back_within_half_a_unit_of_its_third_digit(seconds: float) -> None:
    shown = units.duration(seconds)

    assert read(shown, TIMES) == pytest.approx(seconds, rel=5.01e-3)
    assert significant(shown) == 3


@given(st.floats(min_value=0, max_value=1e6), st.floats(min_value=0, max_value=1e6))
def test_a_longer_time_never_reads_shorter(a: float, b: float) -> None:
    short, long = sorted((a, b))

    assert read(units.duration(short), TIMES) <= read(units.duration(long), TIMES)


@given(st.floats(min_value=0, max_value=1e-3), st.integers(min_value=3, max_value=4))
def test_a_column_never_shows_nothing_where_there_is_something(seconds: float, digits: int) -> None:
    shown = units.time_unit(1e-3, digits=digits).show(seconds)

    assert (float(shown.removeprefix("<")) == 0) == (seconds == 0)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_reads_back_and_stays_short(num_bytes: int) -> None:
    shown = units.size(num_bytes)

    assert read(shown, BINARY) == pytest.approx(num_bytes, rel=5.01e-3)
    assert len(shown) <= len("0.977 MiB")


@given(st.floats(min_value=1, max_value=1e20))
def test_no_number_is_shown_with_an_exponent(value: float) -> None:
    texts = [
        units.number(value),
        units.work(value),
        units.work_rate(value),
        units.size_rate(value),
        units.duration(value),
    ]

    assert not any(re.search(r"\de", text) for text in texts)


@given(st.floats(min_value=0, max_value=1))
def test_a_percentage_is_nothing_only_when_the_fraction_is(fraction: float) -> None:
    assert (units.percent(fraction) == "0 %") == (fraction == 0)


@pytest.mark.parametrize(
    ("gain", "shown"),
    [
        ((1.3, 1.6), "1.3x - 1.6x"),
        ((1.304, 1.31), "1.3x"),
        ((1.02, 1.04), "1.02x - 1.04x"),
        ((1.02, 5.0), "1.0x - 5.0x"),
        ((11.6, 31.2), "12x - 31x"),
        ((1.5, math.inf), "1.5x - -"),
    ],
)
def test_a_speedup_has_no_more_decimals_than_it_needs(gain: tuple[float, float], shown: str) -> None:
    assert units.speedup(gain) == shown


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(value: float | None) -> None:
    shown = {f(value) for f in (units.duration, units.size, units.work, units.number, units.percent)}

    assert shown == {"-"}


def test_a_size_goes_to_the_next_prefix_before_it_needs_four_digits() -> None:
    assert units.size(1023) == "0.999 KiB"
