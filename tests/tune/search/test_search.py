"""The search, in made-up worlds whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planning_world import PEAK_BYTES, STEP_S, World, candidate, lever

from flatout.core.errors import PlanError
from flatout.core.records.lever import Candidate, PlannedLever
from flatout.core.records.verdict import Guarantee, Speed, Verdict
from flatout.tune.search.goal import Objective, SearchGoal
from flatout.tune.search.search import LeverSearchResult, search_levers
from flatout.tune.search.search_log import SearchLog

NAMES = ("a", "b", "c", "d", "e")


def found(
    world: World,
    candidates: list[Candidate],
    *,
    log: SearchLog | None = None,
    conflicts: dict[str, tuple[str, ...]] | None = None,
    guarantees: dict[str, Guarantee] | None = None,
    allow: Guarantee = "bounded",
    objective: Objective = "time",
    most_bytes: int = 0,
    num_steps: int = 0,
    is_on_device: bool = False,
) -> LeverSearchResult:
    levers = {
        n: lever(n, conflicts=(conflicts or {}).get(n, ()), guarantee=(guarantees or {}).get(n, "bounded"))
        for n in NAMES
    }
    goal = SearchGoal(STEP_S, PEAK_BYTES, objective, most_bytes, allow, num_steps, is_on_device)
    return search_levers(candidates, levers, world, log or SearchLog(), goal)


def ids(result: LeverSearchResult) -> list[str]:
    return [p.id for p in result.levers]


WORLDS = st.builds(
    lambda factors, together, wrong, crashing, most: World(
        dict(zip(NAMES, factors, strict=True)), together=together, wrong=wrong, crashing=crashing, most=most
    ),
    factors=st.lists(st.floats(0.3, 1.5), min_size=5, max_size=5),
    together=st.dictionaries(st.sampled_from([("a", "b"), ("a", "c"), ("b", "d")]), st.floats(0.5, 4.0)),
    wrong=st.sets(st.sampled_from(NAMES), max_size=2),
    crashing=st.sets(st.sampled_from(NAMES), max_size=2),
    most=st.integers(0, 12),
)
PROMISES = st.lists(st.floats(0.0, 0.09), min_size=5, max_size=5).map(
    lambda saved: [candidate(n, s) for n, s in zip(NAMES, saved, strict=True)]
)


@pytest.mark.slow
@given(WORLDS, PROMISES)
def test_no_plan_is_slower_or_wrong(world: World, candidates: list[Candidate]) -> None:
    result = found(world, candidates)
    assert world.is_right(result.levers)
    assert not {p.id for p in result.levers} & world.crashing
    if result.levers:
        assert world.step_s(result.levers) < STEP_S
        assert result.proof is not None and result.proof.outcome == "proved"
    else:
        assert result.proof is None


@pytest.mark.slow
@given(WORLDS, PROMISES)
def test_every_lever_is_in_the_plan_or_left_out_with_a_reason(world: World, candidates: list[Candidate]) -> None:
    result = found(world, candidates)
    named = {p.id for p in result.levers} | {t.lever for t in result.left_out}
    assert named == set(NAMES)
    assert all(t.because for t in result.left_out)


def test_what_promises_most_is_tried_first_and_all_that_helps_is_kept() -> None:
    result = found(World({"a": 0.8, "b": 0.5}), [candidate("a", 0.02), candidate("b", 0.05)])
    assert ids(result) == ["b", "a"]
    assert [p.measured is not None and p.measured[0] for p in result.levers] == pytest.approx([2.0, 1.25])
    assert result.proof is not None and result.proof.speed is not None
    assert result.proof.speed.ratio == pytest.approx(2.5)


def test_a_lever_that_stops_paying_after_another_came_in_is_taken_out() -> None:
    """`a` saves alone what `b` saves too, and costs a little beside it."""
    world = World({"a": 0.6, "b": 0.5}, together={("a", "b"): 1.8})
    result = found(world, [candidate("a", 0.06), candidate("b", 0.05)])
    assert ids(result) == ["b"]


def test_wrong_and_crashing_levers_cost_themselves_alone() -> None:
    world = World({"a": 0.1, "b": 0.2, "c": 0.5}, wrong=["a"], crashing=["b"])
    result = found(world, [candidate("a", 0.09), candidate("b", 0.08), candidate("c", 0.05)])
    assert ids(result) == ["c"]
    reasons = {t.lever: t.because for t in result.left_out}
    assert "gradient Net.weight" in reasons["a"]
    assert "signal 11" in reasons["b"]


def test_when_the_time_is_up_what_was_proved_is_the_plan() -> None:
    unsure = msgspec.structs.replace(candidate("b", 0.05), saved_s=(-0.01, 0.04))
    result = found(World({"a": 0.5, "b": 0.5}, most=1), [candidate("a", 0.05), unsure])
    assert ids(result) == ["a"]
    assert not result.is_complete


def test_what_promises_nothing_is_not_tried() -> None:
    world = World({"a": 0.5})
    assert not found(world, [candidate("a", 0.001)]).levers
    assert world.num_compared == 0


def test_of_two_ways_to_pull_a_lever_one_is_kept() -> None:
    result = found(World({"a": 0.5}), [candidate("a", 0.05, n=1), candidate("a", 0.04, n=2)])
    assert [p.parameters for p in result.levers] == [{"n": 1}]


@pytest.mark.parametrize(
    ("words", "tried"), [(("gradient",), [1, 3]), (("signal 11",), [1, 2]), (("of another kind", "gradient"), [1, 3])]
)
def test_a_fallback_takes_the_place_of_all_other_ways_once_what_it_is_for_has_shown(
    words: tuple[str, ...], tried: list[int]
) -> None:
    """The first way to pull the lever computes another gradient."""
    fallback = msgspec.structs.replace(candidate("a", 0.04, n=3), fallback_for=words)
    ways = [candidate("a", 0.06, n=1), candidate("a", 0.05, n=2), fallback]
    log = SearchLog()
    found(World({"a": 0.5}, wrong=["a"]), ways, log=log)
    assert [attempt.after[-1].parameters["n"] for attempt in log.attempts] == tried


def test_an_error_that_speaks_of_gradients_calls_for_no_fallback_for_others() -> None:
    world = World({"a": 0.5}, crashing=["a"], error="a variable needed for gradient computation was modified in place")
    fallback = msgspec.structs.replace(candidate("a", 0.04, n=2), fallback_for=("gradient",))
    log = SearchLog()
    found(world, [candidate("a", 0.06, n=1), fallback], log=log)
    assert [attempt.after[-1].parameters["n"] for attempt in log.attempts] == [1]


def test_no_fallback_is_tried_where_nothing_fails() -> None:
    fallback = msgspec.structs.replace(candidate("a", 0.09, n=2), fallback_for=("gradient",))
    result = found(World({"a": 0.5}), [candidate("a", 0.05, n=1), fallback])
    assert [p.parameters for p in result.levers] == [{"n": 1}]
    assert not any(t.lever == "a" for t in result.left_out)


def test_levers_that_do_not_go_together_are_not_put_together() -> None:
    result = found(World({"a": 0.5, "b": 0.5}), [candidate("a", 0.05), candidate("b", 0.04)], conflicts={"b": ("a",)})
    assert ids(result) == ["a"]


def test_what_disappoints_makes_room_for_what_does_not_go_with_it() -> None:
    world = World({"a": 0.8, "b": 0.5, "c": 0.9})
    candidates = [candidate("a", 0.08), candidate("b", 0.06), candidate("c", 0.03)]
    result = found(world, candidates, conflicts={"a": ("b",)})
    assert sorted(ids(result)) == ["b", "c"]
    assert any(t.lever == "a" and "b in its place is faster" in t.because for t in result.left_out)
    assert next(p for p in result.levers if p.id == "b").measured == pytest.approx((2.0, 1.98, 2.02), rel=1e-2)


def test_what_would_take_the_place_of_what_was_kept_is_tried_after_the_rest() -> None:
    messages: list[str] = []
    levers = {n: lever(n, conflicts={"b": ("a",)}.get(n, ())) for n in NAMES}
    candidates = [candidate("a", 0.08), candidate("b", 0.07), candidate("c", 0.03)]
    world = World({"a": 0.8, "b": 0.5, "c": 0.9})
    result = search_levers(
        candidates, levers, world, SearchLog(), SearchGoal(STEP_S, PEAK_BYTES), on_progress=messages.append
    )
    assert [t.split()[1] for t in messages if t.startswith("trying") and "without" not in t] == ["a", "c", "b"]
    assert sorted(ids(result)) == ["b", "c"]


def replacing(name: str, saved_s: float, *others: str) -> Candidate:
    return msgspec.structs.replace(candidate(name, saved_s), replaces=others)


def test_what_another_lever_does_as_well_is_not_tried_where_that_one_is_in_the_plan() -> None:
    log = SearchLog()
    result = found(World({"a": 0.5, "b": 0.4}), [candidate("b", 0.08), replacing("a", 0.03, "b")], log=log)
    assert ids(result) == ["a"]
    assert not any(attempt.lever == "b" for attempt in log.attempts)
    assert any(t.lever == "b" and "a does its work as well" in t.because for t in result.left_out)


def test_what_another_lever_would_have_done_as_well_is_tried_where_that_one_fails() -> None:
    result = found(World({"a": 0.5, "b": 0.6}, wrong=["a"]), [candidate("b", 0.08), replacing("a", 0.03, "b")])
    assert ids(result) == ["b"]


def test_what_another_lever_does_as_well_is_not_tried_as_one_with_others() -> None:
    log = SearchLog()
    world = World(dict.fromkeys("abcd", 0.8), most=2)
    promised = [candidate("b", 0.02), candidate("c", 0.06), candidate("d", 0.05), replacing("a", 0.07, "b")]
    found(world, promised, log=log)
    joined = [a for a in log.attempts if a.kind == "together"]
    assert [[p.id for p in a.after] for a in joined] == [["a", "c", "d"]]


def test_a_guarantee_that_was_not_allowed_is_not_tried() -> None:
    world = World({"a": 0.5, "b": 0.5})
    guarantees: dict[str, Guarantee] = {"a": "quality", "b": "exact"}
    result = found(world, [candidate("a", 0.05), candidate("b", 0.04)], guarantees=guarantees, allow="exact")
    assert ids(result) == ["b"]
    assert "quality" in result.left_out[0].because


def test_a_candidate_that_promises_less_than_its_lever_is_judged_by_that() -> None:
    weaker = msgspec.structs.replace(candidate("a", 0.05), guarantee="distribution", because="it draws others")
    result = found(World({"a": 0.5}), [weaker])
    assert ids(result) == []
    assert "it draws others, but its guarantee is 'distribution', 'bounded' is allowed" in result.left_out[0].because
    allowed = found(World({"a": 0.5}), [weaker], allow="distribution")
    assert [(p.id, p.guarantee) for p in allowed.levers] == [("a", "distribution")]


def test_an_interrupted_search_goes_on_from_its_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    candidates = [candidate("a", 0.05), candidate("b", 0.04), candidate("c", 0.03)]
    factors = {"a": 0.5, "b": 0.7, "c": 0.9}
    first = World(factors, most=2)
    found(first, candidates, log=SearchLog(path))
    with open(path, "ab") as file:
        file.write(b'{"purpose": "add", "bef')  # killed while it wrote
    second = World(factors)
    result = found(second, candidates, log=SearchLog(path))
    assert ids(result) == ["a", "b", "c"]
    whole = World(factors)
    assert ids(found(whole, candidates)) == ids(result)
    assert second.num_compared < whole.num_compared
    third = World(factors)
    found(third, candidates, log=SearchLog(path))
    assert third.num_compared == 0


def test_a_log_damaged_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    found(World({"a": 0.5}), [candidate("a", 0.05)], log=SearchLog(path))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0][:20], *lines[1:]]))
    with pytest.raises(PlanError, match="line 1"):
        SearchLog(path)


def test_over_the_limit_memory_is_saved_first_and_time_only_within_it() -> None:
    """'a' saves time and takes memory, 'b' saves memory and costs time, 'c' saves time alone."""
    world = World({"a": 0.5, "b": 1.2, "c": 0.8, "d": 1, "e": 1}, smaller={"a": -300, "b": 400})
    promised = [candidate("a", 0.05), candidate("b", -0.01, saved_bytes=400), candidate("c", 0.02)]
    assert ids(found(world, promised)) == ["a", "c"]
    assert ids(found(world, promised, most_bytes=700)) == ["b", "c"]
    assert ids(found(world, promised, most_bytes=900)) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("factor", "saved", "is_kept", "why"),
    [
        (1.0, 300, True, ""),
        (0.97, 300, True, ""),
        (1.1, 300, False, "slower"),
        (1.0, 20, False, "hardly saves memory"),
    ],
)
def test_what_makes_the_plan_smaller_at_no_cost_is_added_in_the_end(
    factor: float, saved: int, is_kept: bool, why: str
) -> None:
    """'b' acts on what 'a' does."""
    world = World({"a": 0.5, "b": factor}, smaller={"b": saved})
    beside = msgspec.structs.replace(candidate("b", 0.0, saved_bytes=200), beside=("a",))
    result = found(world, [beside, candidate("a", 0.05)])
    assert ids(result) == (["a", "b"] if is_kept else ["a"])
    assert all(p.measured is not None for p in result.levers)
    assert is_kept or [why in t.because for t in result.left_out if t.lever == "b"] == [True]
    world = World({"a": 1.2, "b": factor}, smaller={"b": saved})
    result = found(world, [beside, candidate("a", 0.05)])
    assert not result.levers and any("acts on a" in t.because for t in result.left_out)


@pytest.mark.parametrize(
    ("is_on_device", "factor", "saved", "kept"),
    [(True, 1.0, 100, "ab"), (True, 1.05, 100, "a"), (True, 1.0, 20, "a"), (False, 1.0, 100, "a")],
)
def test_what_saves_much_of_a_devices_memory_at_no_cost_is_added_in_the_end(
    is_on_device: bool, factor: float, saved: int, kept: str
) -> None:
    world, log = World({"a": 0.5, "b": factor}, smaller={"b": saved}), SearchLog()
    promised = [candidate("a", 0.05), candidate("b", 0.0005, saved_bytes=saved)]
    result = found(world, promised, log=log, is_on_device=is_on_device)
    assert ids(result) == list(kept)
    assert len([t for t in result.left_out if t.lever == "b"]) == (kept == "a")
    assert any(a.lever == "b" for a in log.attempts) == (is_on_device and saved > 50)


def test_what_saves_much_of_a_devices_memory_is_begun_with_as_one_where_time_is_short() -> None:
    world, log = World({"a": 0.5, "b": 0.8, "c": 1.0}, smaller={"c": 100}, most=2), SearchLog()
    promised = [candidate("a", 0.05), candidate("b", 0.04), candidate("c", 0.0005, saved_bytes=100)]
    result = found(world, promised, log=log, is_on_device=True)
    assert ids(result) == ["a", "b", "c"]
    assert [a.kind for a in log.attempts] == ["together", "final"]


@pytest.mark.parametrize(("saved", "is_kept"), [(100, True), (10, False)])
def test_what_saves_much_of_a_devices_memory_is_not_taken_out_again_for_its_speed(saved: int, is_kept: bool) -> None:
    """'a' gains on its own, and nothing any more once 'b' came in."""
    world = World({"a": 0.9, "b": 0.6}, together={("a", "b"): 1 / 0.9}, smaller={"a": saved})
    result = found(world, [candidate("a", 0.05), candidate("b", 0.04)], is_on_device=True)
    assert ids(result) == (["a", "b"] if is_kept else ["b"])


def test_what_there_was_no_time_to_make_smaller_is_left_for_the_next_search() -> None:
    world = World({"a": 0.5, "b": 1.0}, smaller={"b": 100}, most=1)
    smaller = msgspec.structs.replace(candidate("b", 0.0005, saved_bytes=100), is_risky=True)  # not tried with others
    result = found(world, [candidate("a", 0.05), smaller], is_on_device=True)
    assert ids(result) == ["a"] and not result.is_complete
    assert [t.because for t in result.left_out if t.lever == "b"] == ["not tried, the time was up: it saves memory"]


def test_nothing_fits_a_limit_that_is_too_low() -> None:
    world = World({"a": 0.5, "b": 1.2, "c": 0.8, "d": 1, "e": 1}, smaller={"b": 400})
    result = found(world, [candidate("b", -0.01, saved_bytes=400), candidate("c", 0.02)], most_bytes=100)
    assert not result.levers


def test_memory_as_the_aim_leaves_levers_of_time_alone() -> None:
    world = World({"a": 0.5, "b": 1.2, "c": 1.5, "d": 1, "e": 1}, smaller={"b": 400, "c": 100})
    promised = [candidate("a", 0.05), candidate("b", -0.01, saved_bytes=350), candidate("c", -0.02, saved_bytes=100)]
    assert ids(found(world, promised, objective="memory")) == ["b", "c"]


def test_another_way_to_pull_a_lever_replaces_the_first_when_it_is_faster() -> None:
    class Modes(World):
        def step_s(self, levers: Sequence[PlannedLever]) -> float:
            modes = {p.parameters["mode"] for p in levers}
            assert len(modes) <= 1
            return STEP_S * {"slow": 0.8, "quick": 0.4, "crash": 0.1}[modes.pop()] if modes else STEP_S

    ways = [candidate("a", saved, mode=mode) for mode, saved in (("slow", 0.07), ("quick", 0.06), ("slow", 0.05))]
    result = found(Modes({}), ways)
    assert [p.parameters for p in result.levers] == [{"mode": "quick"}]
    assert result.levers[0].measured is not None
    assert result.levers[0].measured[0] == pytest.approx(2.5)
    assert any("another way" in t.because for t in result.left_out)


@pytest.mark.parametrize(("gained", "first"), [(0.3, "graphs"), (0.9, "plain")])
def test_of_two_ways_to_pull_a_lever_the_one_for_short_steps_comes_first_once_they_are(
    gained: float, first: str
) -> None:
    log = SearchLog()
    graphs = msgspec.structs.replace(candidate("b", 0.02, mode="graphs"), first_below_s=0.5 * STEP_S)
    ways = [candidate("a", 0.06), candidate("b", 0.03, mode="plain"), graphs]
    found(World({"a": gained, "b": 0.8}), ways, log=log)
    tried = [a.after[-1].parameters["mode"] for a in log.attempts if a.lever == "b"]
    assert tried[0] == first


def test_what_could_not_be_told_is_tried_again_when_the_plan_has_grown() -> None:
    """`a` alone is lost in the noise; beside `b` it is not."""

    class Doubtful(World):
        def compare(
            self,
            before: Sequence[PlannedLever],
            after: Sequence[PlannedLever],
            *,
            objective: Objective,
            is_final: bool,
            is_longer: bool = False,
        ) -> Verdict:
            found = super().compare(before, after, objective=objective, is_final=is_final, is_longer=is_longer)
            is_alone = not before and [p.id for p in after] == ["a"]
            return msgspec.structs.replace(found, outcome="unknown") if is_alone else found

    result = found(Doubtful({"a": 0.9, "b": 0.7}), [candidate("a", 0.05), candidate("b", 0.02)])
    assert sorted(ids(result)) == ["a", "b"]


def test_what_was_tried_is_not_said_to_be_untried_where_there_is_no_time_for_it_again() -> None:
    world = World({"a": 0.97, "b": 0.5}, noise=0.08, final_noise=0.02, most=2)
    world.has_time_for_each = lambda efforts: True  # type: ignore[method-assign]
    result = found(world, [candidate("a", 0.09), candidate("b", 0.05)])
    assert ids(result) == ["b"] and not result.is_complete
    [why] = [t.because for t in result.left_out if t.lever == "a"]
    assert why.startswith("unknown"), "the verdict on it, and nothing else"


def test_what_noise_hid_is_raced_longer_in_the_time_that_is_left() -> None:
    world, candidates = World({"a": 0.93}, noise=0.1), [candidate("a", 0.01)]
    log = SearchLog()
    result = found(world, candidates, log=log)
    assert ids(result) == ["a"] and not result.left_out
    assert [a.kind for a in log.attempts] == ["add", "again", "final"]
    hurried = found(World({"a": 0.93}, noise=0.1, most=1), candidates)
    assert not hurried.levers and [one.lever for one in hurried.left_out] == ["a"]


def test_a_final_proof_that_noise_hides_is_raced_longer_in_the_time_that_is_left() -> None:
    log = SearchLog()
    result = found(World({"a": 0.93}, final_noise=0.1), [candidate("a", 0.01)], log=log)
    assert ids(result) == ["a"]
    assert [a.kind for a in log.attempts] == ["add", "final", "final-again"]
    hurried = found(World({"a": 0.93}, final_noise=0.1, most=1), [candidate("a", 0.01)])
    assert not hurried.levers


def test_one_lever_that_was_compared_with_the_untouched_script_needs_no_final_proof_when_the_time_is_up() -> None:
    log = SearchLog()
    result = found(World({"a": 0.6}, latest=1), [candidate("a", 0.04)], log=log)
    assert ids(result) == ["a"] and result.proof is log.attempts[0].verdict
    small, two = SearchLog(), SearchLog()
    found(World({"a": 0.95}, latest=1), [candidate("a", 0.01)], log=small)
    found(World({"a": 0.6, "b": 0.7}, latest=1), [candidate("a", 0.04), candidate("b", 0.03)], log=two)
    assert small.attempts[-1].kind == two.attempts[-1].kind == "final"


def test_a_lever_that_may_help_is_not_taken_out_for_noise() -> None:
    """Each gains 7 %, and leaving one out cannot be told from noise."""
    world = World({"a": 0.93, "b": 0.93}, noise=0.06)
    assert ids(found(world, [candidate("a", 0.01), candidate("b", 0.009)])) == ["a", "b"]


def test_digits_are_not_given_up_for_a_few_percent() -> None:
    world = World({"a": 0.93, "b": 0.6})
    coarse = {n: msgspec.structs.replace(lever(n), dtype=lambda parameters: "bfloat16") for n in ("a", "b")}
    goal = SearchGoal(STEP_S, PEAK_BYTES)
    result = search_levers([candidate("b", 0.05), candidate("a", 0.02)], coarse, world, SearchLog(), goal)
    assert ids(result) == ["b"]
    assert any("coarser numbers" in t.because for t in result.left_out)


def test_a_lever_that_pays_after_the_end_of_the_run_is_left_out() -> None:
    """`a` saves 50 ms a step and starts 20 s later: it pays from step 408 on."""
    promised = [candidate("a", 0.06), candidate("b", 0.05)]
    factors = {"a": 0.5, "b": 0.8}
    short = found(World(factors, later_s={"a": 20.0}), promised, num_steps=300)
    assert ids(short) == ["b"]
    [because] = [t.because for t in short.left_out if t.lever == "a"]
    assert "it pays from step 408 on, and the run has 300" in because
    assert "--run-steps" not in because
    assert ids(found(World(factors, later_s={"a": 20.0}), promised, num_steps=500)) == ["a", "b"]
    assert ids(found(World(factors, later_s={"a": 20.0}), promised)) == ["a", "b"]


@pytest.mark.parametrize(
    ("low", "later_s", "words"),
    [
        (1.5, 20.0, ""),
        (1.016, 20.0, ""),  # at worst a run of 650 s ends 10 s later, and probably 300 s sooner
        (1.016, 60.0, "1.02x faster a step, but the first steps end"),
        (1.5, 400.0, "1.80x faster a step, but the first steps end"),
    ],
)
def test_a_plan_is_left_out_where_its_run_would_be_noticeably_slower_at_worst(
    low: float, later_s: float, words: str
) -> None:
    speed = Speed(
        ratio=1.8,
        low=low,
        high=2.1,
        num_pairs=7,
        before_s=0.24,
        after_s=0.24 / 1.8,
        num_first=8,
        first_before_s=5.0,
        first_after_s=5.0 + later_s,
    )
    goal = SearchGoal(0.24, PEAK_BYTES, "time", 0, "bounded", 2700, True)
    found_late = goal.too_late_at_worst(speed)
    assert found_late.startswith(words) and bool(found_late) == bool(words)


def test_a_script_that_comes_to_its_end_says_how_long_its_runs_are() -> None:
    world = World({"a": 0.5}, later_s={"a": 20.0}, num_run=300)
    result = found(world, [candidate("a", 0.06)])
    assert not result.levers
    assert "the run has 300 (--run-steps N for longer runs)" in result.left_out[0].because
    assert ids(found(world, [candidate("a", 0.06)], num_steps=10_000)) == ["a"]


def test_what_is_for_memory_may_take_longer() -> None:
    world = World({"a": 1.2}, later_s={"a": 20.0}, num_run=300, smaller={"a": 500})
    result = found(world, [candidate("a", -0.01, saved_bytes=500)], objective="memory")
    assert ids(result) == ["a"]


def test_gains_that_noise_hides_alone_are_tried_together() -> None:
    """Each gains 6 %, which cannot be told from noise of 8 %: all three together can."""
    world = World({"a": 0.94, "b": 0.94, "c": 0.94, "d": 1.03}, noise=0.08, final_noise=0.02)
    log = SearchLog()
    candidates = [candidate(name, 0.01) for name in "abcd"]
    result = found(world, candidates, log=log)
    assert sorted(ids(result)) == ["a", "b", "c"]
    assert [t.lever for t in result.left_out] == ["d"]
    assert "together" in [a.kind for a in log.attempts]


def test_levers_that_are_tried_together_have_the_guarantee_by_which_they_were_judged() -> None:
    world = World({"a": 0.94, "b": 0.94}, noise=0.08, final_noise=0.02)
    candidates = [candidate(name, 0.01) for name in "ab"]
    result = found(world, candidates, guarantees={"a": "exact", "b": "exact"})
    assert [p.guarantee for p in result.levers] == ["bounded", "bounded"]


def test_a_wrong_lever_is_not_tried_with_the_others() -> None:
    world = World({"a": 0.94, "b": 0.94, "c": 0.5}, noise=0.08, final_noise=0.02, wrong=["c"])
    result = found(world, [candidate(name, 0.01) for name in "abc"])
    assert sorted(ids(result)) == ["a", "b"] and world.is_right(result.levers)


def test_where_time_is_short_all_that_is_cheap_is_begun_with_as_one() -> None:
    world, log = World({"a": 0.8, "b": 0.7, "c": 0.9}, most=2), SearchLog()
    result = found(world, [candidate(name, 0.03) for name in "abc"], log=log)
    assert sorted(ids(result)) == ["a", "b", "c"]
    assert [a.kind for a in log.attempts] == ["together", "final"]
    assert not result.left_out
    measured = [p.measured for p in result.levers]
    assert measured[:2] == [None, None], "nothing is known of one alone"
    assert measured[2] is not None and measured[2][0] == pytest.approx(1 / (0.8 * 0.7 * 0.9))


def test_what_gains_too_little_now_is_begun_with_where_the_others_leave_a_short_step() -> None:
    world = World({"a": 0.3, "b": 0.6, "c": 0.95}, most=2)
    result = found(world, [candidate("a", 0.06), candidate("b", 0.04), candidate("c", 0.0012)])
    assert sorted(ids(result)) == ["a", "b", "c"]
    alone = found(World({"c": 0.95}, most=2), [candidate("c", 0.0012)])
    assert not alone.levers
    most = msgspec.structs.replace(candidate("a", 0.0), saved_s=(0.005, 0.09))  # as of float32 products in bfloat16
    world = World({"a": 0.3, "b": 0.9, "c": 0.95}, most=1)
    result = found(world, [most, candidate("b", 0.01), candidate("c", 0.0004)])
    assert sorted(ids(result)) == ["a", "b", "c"], "the others may make the step short"
    slow = found(
        World({"a": 0.97, "b": 0.97, "c": 0.95}, most=2), [candidate(n, 0.003) for n in "ab"] + [candidate("c", 0.0012)]
    )
    assert "c" not in ids(slow), "the others do not make the step short"


def test_what_gains_little_does_not_keep_out_what_gains_more() -> None:
    world, log = World({"a": 0.3, "b": 0.6, "c": 0.95}, most=1), SearchLog()
    doubtful = msgspec.structs.replace(candidate("b", 0.0), saved_s=(-0.0019, 0.0025))  # comes behind c in the order
    promised = [candidate("c", 0.0012), candidate("a", 0.06), doubtful]
    result = found(world, promised, log=log, conflicts={"c": ("b",)})
    assert sorted(ids(result)) == ["a", "b"]


@pytest.mark.parametrize(("at_most_s", "is_tried"), [(0.04, False), (0.06, True)])
def test_a_rival_of_what_came_in_as_one_is_tried_where_it_may_save_more(at_most_s: float, is_tried: bool) -> None:
    world, log = World({"a": 0.9, "b": 0.9, "c": 0.9, "d": 0.5}, most=2), SearchLog()
    rival = msgspec.structs.replace(candidate("d", 0.0), saved_s=(0.0, at_most_s))
    result = found(world, [*(candidate(n, 0.05) for n in "abc"), rival], log=log, conflicts={"d": ("a",)})
    assert log.attempts[0].kind == "together"
    assert [a.lever for a in log.attempts if a.kind == "swap"] == ["d"] * is_tried
    because = [o.because for o in result.left_out if o.lever == "d"]
    assert because == ([] if is_tried else ["it does not go with a, which promises more"])


@pytest.mark.parametrize("most", [1000, 1])
def test_what_met_nothing_to_change_is_in_no_plan_however_fast_it_seemed(most: int) -> None:
    world = World({"a": 0.7, "b": 0.8, "c": 0.7}, idle=["b"], most=most)
    result = found(world, [candidate(name, 0.03) for name in "abc"])
    assert sorted(ids(result)) == ["a", "c"]
    assert [o.because for o in result.left_out] == ["it met nothing to change in the steps that were raced"]


def test_where_none_of_several_met_anything_there_is_no_plan() -> None:
    result = found(World({"a": 0.7, "b": 0.8}, idle=["a", "b"], most=1), [candidate(name, 0.03) for name in "ab"])
    assert not result.levers and result.proof is None


@pytest.mark.parametrize(("most", "tried"), [(1, ["together", "final"]), (3, ["add", "add", "add", "final"])])
def test_what_may_compute_something_else_is_tried_alone_behind_the_others(most: int, tried: list[str]) -> None:
    world, log = World({"a": 0.7, "b": 0.8, "c": 0.6}, wrong=["c"], most=most), SearchLog()
    risky = msgspec.structs.replace(candidate("c", 0.09), is_risky=True)
    result = found(world, [risky, candidate("a", 0.03), candidate("b", 0.03)], log=log)
    assert sorted(ids(result)) == ["a", "b"]
    assert [a.kind for a in log.attempts] == tried
    assert all(p.id != "c" for a in log.attempts if a.kind == "together" for p in a.after)


def test_what_came_in_as_one_is_given_up_as_one_where_the_final_proof_shows_no_gain() -> None:
    """A proof without each of them in turn would take as long again."""
    world, log = World({"a": 0.97, "b": 0.97, "c": 0.97}, final_noise=0.3, most=1), SearchLog()
    result = found(world, [candidate(name, 0.03) for name in "abc"], log=log)
    assert [a.kind for a in log.attempts] == ["together", "final"]
    assert not result.levers and result.proof is None
    assert {one.lever for one in result.left_out} == {"a", "b", "c"}


@pytest.mark.parametrize(("saved_s", "first"), [(0.08, "add"), (0.01, "together")])
def test_on_a_device_what_is_expensive_goes_first_where_it_promises_more_than_all_that_is_cheap(
    saved_s: float, first: str
) -> None:
    levers = {name: msgspec.structs.replace(lever(name), effort=4.0 if name == "c" else 1.0) for name in "abc"}
    expensive = msgspec.structs.replace(candidate("c", saved_s), saved_s=(0.0, saved_s))
    for is_on_device in (True, False):
        log = SearchLog()
        goal = SearchGoal(STEP_S, PEAK_BYTES, "time", 0, "bounded", 0, is_on_device)
        candidates = [expensive, candidate("a", 0.01), candidate("b", 0.01)]
        search_levers(candidates, levers, World({"a": 0.95, "b": 0.9, "c": 0.5}, most=1), log, goal)
        assert log.attempts[0].kind == (first if is_on_device else "together")


@pytest.mark.parametrize(
    ("most", "crashing", "kinds"),
    [
        (9, "", ["add", "add", "add", "add"]),
        (3, "", ["add", "together"]),
        (3, "d", ["add", "together", "add"]),
        (2, "", ["add", "add"]),
    ],
)
def test_on_a_device_what_is_expensive_is_tried_as_one_where_there_is_no_time_for_each(
    most: int, crashing: str, kinds: list[str]
) -> None:
    """If they fail, there has to be time for the first alone."""
    levers = {name: msgspec.structs.replace(lever(name), effort=1.0 if name == "a" else 5.0) for name in "abcd"}
    world, log = World({"a": 0.9, "b": 0.8, "c": 0.9, "d": 0.9}, crashing=list(crashing), most=most), SearchLog()
    candidates = [candidate("a", 0.09), candidate("b", 0.05), candidate("c", 0.03), candidate("d", 0.02)]
    goal = SearchGoal(STEP_S, PEAK_BYTES, "time", 0, "bounded", 0, True)
    result = search_levers(candidates, levers, world, log, goal)
    assert [a.kind for a in log.attempts if a.kind not in ("final", "drop")] == kinds
    assert ids(result)[:2] == ["a", "b"] and world.is_right(result.levers)
    assert len(result.levers) == (4 if most > 2 and not crashing else 2)


def test_what_is_judged_by_losses_does_not_have_the_others_judged_so() -> None:
    world, log = World({"a": 0.8, "b": 0.7, "c": 0.9}, most=1), SearchLog()
    promised = [candidate(name, 0.03) for name in "abc"]
    found(world, promised, log=log, guarantees={"c": "quality"}, allow="quality")
    assert log.attempts[0].kind == "together"
    assert [p.id for p in log.attempts[0].after] == ["a", "b"]


def test_where_those_begun_with_are_wrong_they_are_tried_alone() -> None:
    world = World({"a": 0.8, "b": 0.4}, wrong=["a"], most=1)
    assert not found(world, [candidate(name, 0.03) for name in "ab"]).levers
    world = World({"a": 0.8, "b": 0.4, "c": 0.9}, wrong=["a"], most=2)
    assert ids(found(world, [candidate("b", 0.05), candidate("a", 0.03), candidate("c", 0.02)])) == ["b"]


ERROR = "'train.py' ended after 0 steps: RuntimeError: view size is not compatible with input tensor's size and stride"


@pytest.mark.parametrize("errors", [("view size is not compatible",), ()])
def test_where_those_begun_with_fail_they_are_tried_again_without_the_one_that_fails(errors: tuple[str, ...]) -> None:
    """It is found by the words of its error, or is the only one that may round."""
    guarantees: dict[str, Guarantee] = {"a": "bounded", "b": "exact", "c": "exact"}
    levers = {n: lever(n, guarantee=g) for n, g in guarantees.items()}
    levers["a"] = msgspec.structs.replace(levers["a"], errors=errors)
    world, log = World({"a": 0.8, "b": 0.7, "c": 0.9}, crashing=["a"], error=ERROR, most=3), SearchLog()
    candidates = [candidate("a", 0.05), candidate("b", 0.03), candidate("c", 0.02)]
    world.has_time_for_each = lambda efforts: False  # type: ignore[method-assign]
    result = search_levers(candidates, levers, world, log, SearchGoal(STEP_S, PEAK_BYTES))
    assert sorted(ids(result)) == ["b", "c"]
    assert [a.kind for a in log.attempts[:2]] == ["together", "together"]
    assert any(one.lever == "a" and "view size" in one.because for one in result.left_out)
    is_tried_alone = any(a.kind == "add" and a.lever == "a" for a in log.attempts)
    assert is_tried_alone == (not errors), "what has failed once needs no trial of its own"


def test_an_error_of_torch_is_told_by_what_it_means_for_the_script() -> None:
    error = "RuntimeError: torch.compile with aot_autograd does not currently support double backward"
    result = found(World({"a": 0.5}, crashing=["a"], error=error), [candidate("a", 0.05)])
    [left_out] = result.left_out
    assert left_out.because == "the script takes gradients of gradients, which compiled code does not have"


def test_levers_that_all_may_round_are_not_tried_as_one_again() -> None:
    world, log = World({"a": 0.8, "b": 0.4}, crashing=["a"], most=4), SearchLog()
    world.has_time_for_each = lambda efforts: False  # type: ignore[method-assign]
    assert ids(found(world, [candidate(name, 0.03) for name in "ab"], log=log)) == ["b"]
    assert [a.kind for a in log.attempts] == ["together", "add", "add", "final"]


def companion(name: str) -> Candidate:
    """What gains nothing alone."""
    return msgspec.structs.replace(candidate(name, 0.0), is_companion=True)


def test_what_limits_the_step_once_others_made_it_faster_is_tried_with_them() -> None:
    world = World({"a": 0.97, "b": 1.0}, together={("a", "b"): 0.5}, noise=0.08)
    result = found(world, [candidate("a", 0.05), companion("b")])
    assert sorted(ids(result)) == ["a", "b"]


def test_what_limits_nothing_is_left_out_with_the_reason() -> None:
    result = found(World({"a": 1.2, "b": 1.0}), [candidate("a", 0.05), companion("b")])
    assert not result.levers
    assert {t.lever: t.because for t in result.left_out}["b"].startswith("it gains nothing alone")
    alone = found(World({"b": 1.0}), [companion("b")])
    assert not alone.levers and [t.lever for t in alone.left_out] == ["b"]


def test_what_was_tried_as_one_is_proved_by_that_where_the_final_proof_would_end_too_late() -> None:
    log = SearchLog()
    result = found(World({"a": 0.8, "b": 0.7}, most=1, latest=1), [candidate(name, 0.03) for name in "ab"], log=log)
    assert sorted(ids(result)) == ["a", "b"]
    assert [a.kind for a in log.attempts] == ["together"]
    assert result.proof is not None and result.proof.outcome == "proved"


def test_once_time_turns_out_to_be_short_what_is_left_is_tried_as_one() -> None:
    world, log = World({"a": 0.97, "b": 0.8, "c": 0.9}, most=3), SearchLog()
    slow = iter([True, False])
    world.has_time_for_each = lambda efforts: next(slow)  # type: ignore[method-assign]
    result = found(world, [candidate("a", 0.05), candidate("b", 0.03), candidate("c", 0.02)], log=log)
    assert [a.kind for a in log.attempts][:2] == ["add", "together"]
    assert sorted(ids(result)) == ["a", "b", "c"]
    assert not result.left_out
