from __future__ import annotations

import pytest
from tests.fleet_jobs import NOW_S, WEEK_S, finding, job

from flatout.check.fleet.regressions import regressions_of
from flatout.core.records.job import JobRecord

SINCE_S = NOW_S - WEEK_S


def before(number: int, step_s: float, **changes: object) -> JobRecord:
    return job(number, workload="w", step_s=step_s, began_s=SINCE_S - 1e4 * (number + 1), **changes)


def now(number: int, step_s: float, **changes: object) -> JobRecord:
    return job(100 + number, workload="w", step_s=step_s, began_s=SINCE_S + 1e4 * (number + 1), **changes)


def test_a_workload_that_became_slower_is_named_with_what_changed() -> None:
    slow = now(0, 0.15, torch="2.14.0", code_revision="bbb", findings=(finding((1.3, 1.5)),))
    (found,) = regressions_of([before(0, 0.1, code_revision="aaa"), slow], since_s=SINCE_S)

    assert (found.before_s, found.now_s, found.job) == (0.1, 0.15, slow.job)
    assert found.least_ratio == pytest.approx(0.15 * 0.99 / (0.1 * 1.01))
    assert "torch 2.13.0 -> 2.14.0" in found.changed
    assert "code aaa -> bbb" in found.changed
    assert any(text.startswith("new cause: An item takes long") for text in found.changed)
    assert found.hours.gpu == pytest.approx(8.0 / 3)


@pytest.mark.parametrize(
    "rows",
    [
        [before(0, 0.1), now(0, 0.104)],  # less than 5 %
        [before(0, 0.1), now(0, 0.12, low_s=0.08, high_s=0.2)],  # too uncertain
        [before(0, 0.1, low_s=0.08, high_s=0.2), now(0, 0.12)],
        [before(0, 0.1), now(0, 0.05)],  # faster
        [now(0, 0.1), now(1, 0.2)],  # nothing before
        [before(0, 0.1), before(1, 0.2)],  # nothing since
        [before(0, 0.1), now(0, 0.2, rank=8)],  # the other node of a job
    ],
)
def test_no_other_workload_is_named(rows: list[JobRecord]) -> None:
    assert regressions_of(rows, since_s=SINCE_S) == []


def test_of_many_jobs_one_slow_one_is_no_regression() -> None:
    rows = [before(i, 0.1 + 0.001 * (i % 3)) for i in range(8)] + [now(i, 0.1) for i in range(7)] + [now(7, 0.3)]

    assert regressions_of(rows, since_s=SINCE_S) == []


def test_most_jobs_slower_is_one_although_a_few_are_fast() -> None:
    rows = [before(i, 0.1) for i in range(8)] + [now(i, 0.12) for i in range(7)] + [now(7, 0.1)]

    (found,) = regressions_of(rows, since_s=SINCE_S)
    assert found.now_s == pytest.approx(0.12)
    assert (found.num_before, found.num_now) == (8, 8)


def test_the_costliest_comes_first() -> None:
    small = [job(1, workload="a", began_s=SINCE_S - 9e3), job(2, workload="a", step_s=0.2, seconds=600.0)]
    large = [job(3, workload="b", began_s=SINCE_S - 9e3), job(4, workload="b", step_s=0.2, seconds=36_000.0)]

    found = regressions_of([*small, *large], since_s=SINCE_S)
    assert [one.workload for one in found] == ["b", "a"]
