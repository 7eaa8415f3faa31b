"""Comparisons that workers make ahead of the search."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from tests.planning_world import World, candidate, verdict
from tests.tune.search.test_search import found, ids

from flatout.core.errors import UsageError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan
from flatout.core.records.verdict import Equality, Verdict
from flatout.tune.search.comparisons import ComparisonsAhead, LeverComparison, Task
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

EQUAL = Equality(guarantee="bounded", holds=True)


class FakeTask:
    def __init__(self, comparison: LeverComparison, found: Verdict | None) -> None:
        self.comparison, self.found, self.is_cancelled = comparison, found, False

    def verdict(self, timeout_s: float) -> Verdict | None:
        return self.found

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeWorkers:
    def __init__(self, number: int, *, device: str = "cpu", fails: bool = False) -> None:
        self.number = number
        self.tasks: list[FakeTask] = []
        self._found = None if fails else msgspec.structs.replace(verdict(EQUAL, None, "proved", ""), device=device)

    def start(self, comparisons: Sequence[LeverComparison]) -> Sequence[Task]:
        new = [FakeTask(comparison, self._found) for comparison in comparisons]
        self.tasks += new
        return new


def comparison(*after: str, before: Sequence[str] = ()) -> LeverComparison:
    def planned(ids: Sequence[str]) -> tuple[PlannedLever, ...]:
        return tuple(PlannedLever(id=id, guarantee="exact") for id in ids)

    return LeverComparison(
        script=Request(target="train.py"),
        plan=Plan(script="train.py"),
        before=planned(before),
        after=planned((*before, *after)),
        usual_terms=ProofTerms(),
        terms=ProofTerms(),
    )


def ahead_of(workers: FakeWorkers, notes: list[str] | None = None) -> ComparisonsAhead:
    return ComparisonsAhead(workers, device="cpu", on_progress=(notes if notes is not None else []).append)


def test_workers_begin_with_what_comes_first_and_no_more_than_there_are() -> None:
    workers = FakeWorkers(2)
    ahead = ahead_of(workers)
    wanted = [comparison(id) for id in "abcd"]

    ahead.expect(wanted)
    ahead.expect(wanted)
    assert [t.comparison.after[0].id for t in workers.tasks] == ["a", "b"]

    assert ahead.take(wanted[0], timeout_s=1.0) is not None
    ahead.expect(wanted[1:])
    assert [t.comparison.after[0].id for t in workers.tasks] == ["a", "b", "c"]
    assert not any(t.is_cancelled for t in workers.tasks)


def test_what_the_search_does_not_come_to_any_more_is_given_up() -> None:
    workers = FakeWorkers(3)
    ahead = ahead_of(workers)
    ahead.expect([comparison(id) for id in "abc"])

    ahead.expect([comparison("b", before="a"), comparison("c", before="a")])

    assert [t.is_cancelled for t in workers.tasks] == [True, True, True, False, False]
    assert ahead.take(comparison("b"), timeout_s=1.0) is None
    ahead.end()
    assert all(t.is_cancelled for t in workers.tasks)


def test_where_a_worker_fails_the_search_compares_itself_and_says_so() -> None:
    notes: list[str] = []
    ahead = ahead_of(FakeWorkers(1, fails=True), notes)
    ahead.expect([comparison("a")])

    assert ahead.take(comparison("a"), timeout_s=1.0) is None
    assert notes == ["a worker has failed; the comparison is made here"]


def test_a_worker_with_another_device_is_refused() -> None:
    ahead = ahead_of(FakeWorkers(1, device="NVIDIA A100"))
    ahead.expect([comparison("a")])

    with pytest.raises(UsageError, match="a worker has 'NVIDIA A100'"):
        ahead.take(comparison("a"), timeout_s=1.0)


def test_a_search_says_what_comes_next_and_again_once_it_has_adopted_something() -> None:
    world = World({"a": 0.5, "b": 1.0, "c": 0.8, "d": 1.0, "e": 1.0}, noise=0.01)
    candidates = [candidate(n, s) for n, s in (("a", 0.06), ("b", 0.05), ("c", 0.04))]

    result = found(world, candidates)

    assert ids(result) == ["a", "c"]
    assert world.expected[0] == [("a",), ("b",), ("c",)]
    assert world.expected[1] == [("a", "b"), ("a", "c")]
    assert world.expected[2] == [("a", "c")]
