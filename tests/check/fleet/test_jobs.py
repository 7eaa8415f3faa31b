from __future__ import annotations

import pytest
from tests.fleet_jobs import NOW_S, finding, job

from flatout.check.fleet.jobs import LOST_S, jobs_of
from flatout.check.fleet.prices import NO_PRICES, PriceList
from flatout.core.records.fleet import FleetJob, Hours
from flatout.core.records.job import JobRecord


def only(*records: JobRecord, prices: PriceList = NO_PRICES, now_s: float = NOW_S) -> FleetJob:
    (found,) = jobs_of(records, now_s=now_s, prices=prices)
    return found


def test_a_cause_wastes_its_share_of_the_time_in_steps() -> None:
    # ten of twenty hours in steps: a gain of 2 saves five hours on each of 4 GPUs
    found = only(
        job(
            seconds=20 * 3600.0,
            num_gpus=4,
            step_s=1.0,
            num_steps=36_000,
            findings=(finding((1.25, 2.0)),),
            saved_fraction=0.5,
        )
    )

    (waste,) = found.wastes
    assert found.hours == Hours(gpu=80.0)
    assert waste.low.gpu == pytest.approx(0.2 * 40)
    assert waste.high.gpu == pytest.approx(0.5 * 40)
    assert (found.low, found.high) == (waste.low, waste.high)


def test_causes_that_overlap_are_not_added_up() -> None:
    both = (finding((1.5, 2.0)), finding((1.2, 1.25), rule="overhead.host-sync"))
    found = only(job(findings=both, saved_fraction=0.6, step_s=0.1))

    assert found.high.gpu == pytest.approx(0.6 * found.hours.gpu, rel=1e-6)
    assert found.low.gpu == pytest.approx(found.hours.gpu / 3, rel=1e-6)
    assert found.high.gpu < sum(w.high.gpu for w in found.wastes)


def test_nodes_and_restarts_of_a_job_are_one_job() -> None:
    records = [
        job(i, job="a", workload="w", node=f"n{i % 2}", rank=8 * (i % 2), restart=i // 2, world_size=16, seconds=3600.0)
        for i in range(4)
    ]
    found = only(*records)

    assert found.hours == Hours(gpu=32.0)
    assert found.nodes == ("n0", "n1")
    assert (found.num_gpus, found.num_starts) == (16, 2)


def test_causes_are_those_of_the_start_that_was_looked_into() -> None:
    first = job(1, job="a", workload="w", findings=(finding((1.1, 1.2)),), saved_fraction=0.1)
    again = job(2, job="a", workload="w", restart=1, saved_fraction=None, not_looked="it ran 20 s")

    assert [w.rule for w in only(first, again).wastes] == ["input.slow-item"]
    assert only(first, again).not_looked == ""


def test_a_job_that_makes_no_steps_wastes_its_devices_since_the_last_one() -> None:
    began_s = NOW_S - 4 * 3600.0
    stalled = job(
        began_s=began_s, seconds=4 * 3600.0, outcome="running", num_gpus=2, last_step_s=began_s + 3600.0, step_s=0.1
    )
    found = only(stalled)

    (waste,) = found.wastes
    assert waste.kind == "stalled"
    assert (waste.low, waste.high) == (Hours(), Hours(gpu=6.0))
    assert (found.low, found.high) == (Hours(), Hours(gpu=6.0))


def test_a_pause_of_some_slow_steps_is_no_stall() -> None:
    slow = job(seconds=7200.0, step_s=60.0, last_step_s=NOW_S - 86400.0 + 7200.0 - 1200.0)

    assert only(slow).wastes == ()


def test_a_job_without_gpus_wastes_core_hours() -> None:
    found = only(job(num_gpus=0, num_cores=32, device="cpu", findings=(finding((2.0, 2.0)),), saved_fraction=0.5))

    assert found.hours == Hours(core=32.0)
    assert found.high.core == pytest.approx(16.0, rel=1e-3)
    assert found.high.gpu == 0.0


def test_a_failed_job_says_so_without_counting_its_hours_as_wasted() -> None:
    found = only(job(outcome="failed", error="OutOfMemoryError: no"))

    (waste,) = found.wastes
    assert (waste.kind, waste.high, found.high) == ("failed", found.hours, Hours())
    assert "OutOfMemoryError" in waste.because


def test_a_job_that_stopped_writing_was_killed() -> None:
    silent = job(outcome="running", began_s=NOW_S - 7200.0, seconds=3600.0)

    assert only(silent).outcome == "lost"
    assert only(silent, now_s=silent.written_s + LOST_S / 2).outcome == "running"
    assert only(job(outcome="finished", began_s=NOW_S - 1e6)).outcome == "finished"


def test_a_long_start_is_named() -> None:
    found = only(job(seconds=3600.0, start_s=1800.0, num_steps=18_000, step_s=0.1))

    assert [w.kind for w in found.wastes] == ["start"]
    assert found.high.gpu == pytest.approx(4.0)
    assert only(job(seconds=36_000.0, start_s=1800.0)).wastes == ()


def test_what_is_wasted_is_never_more_than_what_was_used() -> None:
    began_s = NOW_S - 3600.0
    found = only(
        job(
            began_s=began_s,
            seconds=3600.0,
            findings=(finding((9.0, 99.0)),),
            saved_fraction=0.99,
            start_s=3000.0,
            last_step_s=began_s + 600.0,
        )
    )

    assert found.low.gpu <= found.high.gpu <= found.hours.gpu


def test_money_needs_a_price_of_what_was_used() -> None:
    cause = {"findings": (finding((2.0, 2.0)),), "saved_fraction": 0.5}
    gpu, cpu = job(1, **cause), job(2, num_gpus=0, num_cores=10, device="cpu", **cause)

    assert only(gpu).cost is None
    assert only(gpu, prices=PriceList(2.5)).cost == pytest.approx(20.0)
    assert only(gpu, prices=PriceList(2.5, gpus=(("NVIDIA H200", 4.0),))).cost == pytest.approx(32.0)
    assert only(cpu, prices=PriceList(2.5)).cost is None
    assert only(cpu, prices=PriceList(2.5, 0.05)).cost == pytest.approx(0.5)
    wasted = only(gpu, prices=PriceList(2.5)).wasted_cost
    assert wasted is not None
    assert wasted[0] == pytest.approx(10.0, rel=1e-3)
