"""Plans: written for people, read back as they were, refused when they cannot be what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import PlanError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Circumstances, Plan, from_toml, mismatches, to_toml

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
PLAIN = st.text("abcXYZ_019.,:/+*@<> -", max_size=12)
"""Settings that may be written into a text have no quotes, calls or line ends."""
NUMBERS = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
PARAMETERS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True), NUMBERS | PLAIN | st.tuples(PLAIN, PLAIN), max_size=3
) | st.dictionaries(st.sampled_from(["file", "function", "code", "model", "also"]), NAMES | st.tuples(NAMES, NAMES))
RATIOS = st.none() | st.tuples(st.floats(0.5, 9), st.floats(0.5, 9), st.floats(0.5, 9))
LEVERS = st.builds(
    PlannedLever,
    id=st.sampled_from(["graph.compile", "memory.channels-last"]),
    guarantee=st.sampled_from(["exact", "bounded", "quality"]),
    parameters=PARAMETERS,
    predicted=st.none() | st.tuples(st.floats(1, 9), st.floats(1, 9)),
    measured=RATIOS,
    because=NAMES,
)
PLANS = st.builds(
    Plan,
    script=NAMES,
    arguments=st.lists(NAMES, max_size=3).map(tuple),
    measured=RATIOS,
    because=NAMES,
    proved_on=st.builds(Circumstances, device=NAMES, num_cores=st.integers(0, 256), torch=NAMES),
    lever=st.lists(LEVERS, max_size=3).map(tuple),
)
USUAL = Plan(
    script="train.py",
    measured=(2.0, 1.9, 2.1),
    guarantee="bounded",
    proved_on=Circumstances(device="cpu", num_cores=2, torch="2.13.0+cpu", num_parameters=1000),
    lever=(
        PlannedLever(id="parallelism.thread-count", guarantee="bounded", parameters={"num_threads": 2}),
        PlannedLever(id="graph.compile", guarantee="bounded", measured=(1.5, 1.4, 1.6), because="small operators"),
    ),
)


@pytest.mark.slow
@given(PLANS)
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    assert from_toml(to_toml(plan)) == plan


def test_a_plan_reads_like_a_page() -> None:
    text = to_toml(USUAL).decode()
    assert text.startswith("# A plan of flatout")
    assert "[[lever]]\nid = " in text
    assert "[proved_on]" in text
    assert "num_threads = 2" in text


@given(st.integers(min_value=0, max_value=len(to_toml(USUAL)) - 2))
def test_a_plan_cut_off_anywhere_is_an_error_or_a_shorter_plan(end: int) -> None:
    """Cut between two tables, what is left may be a plan by itself; it never holds what was not written."""
    try:
        plan = from_toml(to_toml(USUAL)[:end])
    except PlanError as e:
        assert "plan" in str(e)
    else:
        assert {p.id for p in plan.lever} <= {p.id for p in USUAL.lever}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version = 99", "99"),
        ("lever = 3", "no plan"),
        ('[[lever]]\nid = "a"\nguarantee = "surely"', "no plan"),
        ("[[lever", "no TOML"),
        ('[[lever]]\nguarantee = "exact"', "id"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        from_toml(text.encode())


@pytest.mark.parametrize(
    ("here", "label"),
    [
        (Circumstances(device="NVIDIA H200"), "device"),
        (Circumstances(num_cores=4), "cores"),
        (Circumstances(torch="2.12.1"), "torch"),
        (Circumstances(num_parameters=1001), "parameters"),
    ],
)
def test_what_matters_and_differs_is_named(here: Circumstances, label: str) -> None:
    [mismatch] = mismatches(USUAL, here)
    assert label in mismatch


def test_a_patch_release_and_what_is_not_known_do_not_matter() -> None:
    assert not mismatches(USUAL, Circumstances(device="cpu", num_cores=2, torch="2.13.1", python="3.12.1"))
    assert not mismatches(Plan(), Circumstances(device="NVIDIA H200", num_cores=16, torch="2.11"))
