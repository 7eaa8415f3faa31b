from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet_jobs import NOW_S, WEEK_S, finding, fleet, job

from flatout.check.fleet.prices import PriceList
from flatout.check.fleet.summary import summary_of
from flatout.core.records.fleet import FleetSummary, Hours
from flatout.core.records.job import JobRecord
from flatout.core.records.record import from_json, to_json


def week(records: list[JobRecord], prices: PriceList = PriceList(2.5)) -> FleetSummary:  # noqa: B008
    return summary_of(records, since_s=NOW_S - WEEK_S, until_s=NOW_S, prices=prices)


WORST = job(
    10**7,
    name="worst.py",
    seconds=19 * 3600.0,
    num_steps=136_000,
    step_s=0.5,
    findings=(finding((3.0, 4.0), line=77),),
    saved_fraction=0.75,
)


def test_the_worst_of_ten_thousand_jobs_comes_first_with_its_cause() -> None:
    records = fleet(10_000)
    found = week([*records[:5000], WORST, *records[5000:]])

    first = found.jobs[0]
    assert (first.name, first.wastes[0].line) == ("worst.py", 77)
    assert first.high.gpu == pytest.approx(0.75 * 8 * 136_000 * 0.5 / 3600, rel=1e-6)
    assert found.regressions == ()
    assert found.sick_nodes == ()


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 120))
def test_every_division_of_the_fleet_adds_up_to_the_whole(seed: int, number: int) -> None:
    found = week(fleet(number, seed=seed))

    for groups in found.groups.values():
        assert sum(g.hours.gpu for g in groups) == pytest.approx(found.hours.gpu)
        assert sum(g.high.gpu for g in groups) == pytest.approx(found.high.gpu)
        assert sum(g.low.gpu for g in groups) == pytest.approx(found.low.gpu)
    assert sum(job.hours.gpu for job in found.jobs) == pytest.approx(found.hours.gpu)
    assert found.low.gpu <= found.high.gpu <= found.hours.gpu
    if found.num_jobs:
        assert found.cost == pytest.approx(2.5 * found.hours.gpu)
        assert found.utilisation is not None
        assert 0.3 <= found.utilisation <= 0.99
    order = [job.low.gpu + job.high.gpu for job in found.jobs]
    assert order == sorted(order, reverse=True)


def test_a_summary_goes_to_json_and_back() -> None:
    found = week([*fleet(50), WORST])

    assert from_json(to_json(found), FleetSummary) == found


def test_jobs_before_the_time_only_tell_what_was_usual() -> None:
    old = job(1, workload="w", began_s=NOW_S - 1.5 * WEEK_S)
    new = job(2, workload="w", step_s=0.2)
    found = week([old, new])

    assert [j.job for j in found.jobs] == [new.job]
    assert len(found.regressions) == 1


def test_a_job_on_two_nodes_is_shared_out_among_them() -> None:
    parts = [
        job(i, job="a", workload="w", node=f"n{i}", rank=8 * i, world_size=16, findings=causes, saved_fraction=0.5)
        for i, causes in enumerate([(finding((2.0, 2.0)),), ()])
    ]
    found = week(parts)

    (one,) = found.jobs
    assert one.hours == Hours(gpu=16.0)
    assert {g.name: g.high.gpu for g in found.groups["node"]} == pytest.approx(
        {"n0": one.high.gpu / 2, "n1": one.high.gpu / 2}
    )


def test_money_decides_the_order_where_prices_differ() -> None:
    cheap = job(1, device="old", findings=(finding((2.0, 2.0)),), saved_fraction=0.5, seconds=7200.0)
    dear = job(2, device="new", findings=(finding((2.0, 2.0)),), saved_fraction=0.5)
    prices = PriceList(1.0, gpus=(("new", 10.0),))

    assert [j.device for j in week([cheap, dear]).jobs] == ["old", "new"]
    assert [j.device for j in week([cheap, dear], prices).jobs] == ["new", "old"]


def test_where_some_prices_are_unknown_hours_decide_the_order() -> None:
    cause = {"findings": (finding((2.0, 2.0)),), "saved_fraction": 0.5}
    gpu = job(1, **cause)
    cores = job(2, num_gpus=0, num_cores=64, device="cpu", seconds=36_000.0, **cause)

    assert [j.device for j in week([gpu, cores], PriceList(1000.0)).jobs] == ["cpu", "NVIDIA H200"]
    assert [j.device for j in week([gpu, cores], PriceList(1000.0, 0.01)).jobs] == ["NVIDIA H200", "cpu"]


def test_a_cause_over_all_jobs_counts_once_a_job() -> None:
    twice = (finding((1.2, 1.3)), finding((1.2, 1.3), line=99))
    found = week([job(i, findings=twice, saved_fraction=0.3) for i in range(3)])

    (cause,) = found.causes
    assert cause.num_jobs == 3
    assert cause.high.gpu == pytest.approx(3 * found.jobs[0].wastes[0].high.gpu)


def test_an_empty_fleet_has_a_summary() -> None:
    found = week([])

    assert (found.num_jobs, found.hours, found.cost, found.utilisation) == (0, Hours(), None, None)
    assert week([msgspec.structs.replace(WORST, began_s=NOW_S + 1, written_s=NOW_S + 2)]).num_jobs == 0
