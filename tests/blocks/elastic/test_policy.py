"""When a job is started again, where, and when it is abandoned."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.blocks.elastic.messages import Heartbeat, Job, ProcessEnded, RankProgress
from flatout.blocks.elastic.policy import Failure, FailureKind, JobAbandoned, Policy, RankPlace, Restart
from flatout.core.errors import UsageError


def _failure(kind: FailureKind = "signal", slot: int = 0, text: str = "died") -> Failure:
    return Failure(restart=0, rank=slot, node=0, device_slot=slot, kind=kind, text=text, at_s=0.0, reached=0)


def _policy(wanted: int = 2, slots: int = 2, **options: Any) -> Policy:
    policy = Policy(**{"least_ranks": wanted, **options})
    policy.join(0, num_wanted=wanted, num_device_slots=slots)
    return policy


def test_exceptions_without_progress_are_given_up_on_and_with_progress_not() -> None:
    policy = _policy()
    for progress in range(20):
        policy.failed(_failure("exception", progress % 2), progress=progress)
    policy.failed(_failure("exception", 1), progress=19)
    with pytest.raises(JobAbandoned, match="3 times in a row without a step of progress, rank 0: ValueError: x"):
        policy.failed(_failure("exception", 0, "ValueError: x"), progress=19)


def test_kills_at_the_same_step_are_borne_longer_than_exceptions() -> None:
    policy = _policy(3, 3)
    for number in range(9):
        policy.failed(_failure(slot=number % 3), progress=0)
    with pytest.raises(JobAbandoned, match="10 failures in a row"):
        policy.failed(_failure(), progress=0)


def test_a_slot_that_fails_three_times_in_a_row_gives_way_to_a_spare() -> None:
    policy = _policy(2, 3)
    for _ in range(2):
        policy.failed(_failure(slot=1), progress=0)
    policy.failed(_failure(slot=0), progress=0)
    assert policy.places == [RankPlace(0, 0), RankPlace(0, 1)], "not in a row"
    for _ in range(3):
        policy.failed(_failure(slot=1), progress=0)
    assert policy.places == [RankPlace(0, 0), RankPlace(0, 2)]


def test_without_a_spare_there_are_fewer_ranks_only_where_that_is_allowed() -> None:
    few = _policy(2, 2, least_ranks=1)
    for _ in range(3):
        few.failed(_failure(slot=0), progress=0)
    assert few.places == [RankPlace(0, 1)]
    all_ = _policy(2, 2)
    for _ in range(3):
        all_.failed(_failure(slot=0), progress=0)
    assert len(all_.places) == 2


def test_a_bug_leaves_no_slot_out_unless_there_is_a_spare() -> None:
    policy = _policy(2, 2, least_ranks=1)
    with pytest.raises(JobAbandoned, match="without a step of progress"):
        for _ in range(3):
            policy.failed(_failure("exception", 0), progress=4)


def test_a_node_that_leaves_takes_its_ranks_and_brings_them_back() -> None:
    policy = _policy(2, 2, least_ranks=3)
    policy.join(1, num_wanted=2, num_device_slots=2)
    assert [place.node for place in policy.places] == [0, 0, 1, 1]
    policy.leave(1)
    with pytest.raises(JobAbandoned, match="2 ranks are left of the 3"):
        _ = policy.places
    policy.join(1, num_wanted=2, num_device_slots=2)
    assert len(policy.places) == 4


def test_so_many_restarts_and_no_more() -> None:
    policy = _policy(max_restarts=1)
    policy.failed(_failure(), progress=1)
    with pytest.raises(JobAbandoned, match="started again 1 times"):
        policy.failed(_failure(), progress=2)


def _restart(num: int = 2) -> Restart:
    return Restart(0, [RankPlace(0, slot) for slot in range(num)], began_s=0.0, hang_s=10.0, start_s=100.0)


def _progress(rank: int, steps: int, first_ago_s: float | None = 0.0) -> RankProgress:
    return RankProgress(restart=0, rank=rank, heartbeat=Heartbeat(steps, steps, 0), first_ago_s=first_ago_s)


def test_who_was_killed_is_the_cause_and_not_who_then_raised() -> None:
    restart = _restart()
    restart.record_end(ProcessEnded(restart=0, rank=1, code=1, text="RuntimeError: connection closed", ago_s=0.2), 5.0)
    restart.record_end(ProcessEnded(restart=0, rank=0, code=-9), 5.0)
    assert restart.has_failed(5.0)
    assert (restart.cause.rank, restart.cause.kind) == (0, "signal")


def test_of_two_exceptions_the_first_is_the_cause() -> None:
    restart = _restart()
    restart.record_end(ProcessEnded(restart=0, rank=1, code=1, text="RuntimeError: connection closed", ago_s=0.1), 5.0)
    restart.record_end(ProcessEnded(restart=0, rank=0, code=1, text="ValueError: x", ago_s=0.3), 5.0)
    assert restart.cause.text == "ValueError: x"


def test_a_rank_that_only_lost_another_waits_for_what_that_one_says() -> None:
    restart = _restart()
    restart.record_end(
        ProcessEnded(restart=0, rank=1, code=1, text="RuntimeError: Connection closed by peer", ago_s=0.0), 5.0
    )
    assert not restart.has_failed(5.5)
    assert restart.has_failed(6.1)
    restart.record_end(ProcessEnded(restart=0, rank=0, code=1, text="ValueError: x", ago_s=0.0), 5.6)
    assert restart.has_failed(5.6)
    assert restart.cause.text == "ValueError: x"


def test_ranks_killed_by_order_are_no_failure() -> None:
    restart = _restart()
    restart.record_end(ProcessEnded(restart=0, rank=0, code=-9, is_ours=True), 5.0)
    assert not restart.has_failed(5.0)


def test_a_hang_is_found_after_its_time_and_the_slowest_is_blamed() -> None:
    restart = _restart()
    restart.record_progress(_progress(0, 4), 20.0)
    restart.record_progress(_progress(1, 3), 20.0)
    assert not restart.has_failed(29.9)
    assert restart.has_failed(30.1)
    assert (restart.cause.kind, restart.cause.rank) == ("hang", 1)


def test_before_its_first_step_a_rank_has_more_time() -> None:
    restart = _restart()
    restart.record_progress(_progress(0, 0, first_ago_s=None), 1.0)
    assert not restart.has_failed(99.0)
    assert restart.has_failed(101.5)


def test_recovered_is_when_the_last_rank_has_done_a_step() -> None:
    restart = _restart()
    restart.record_progress(_progress(0, 1, first_ago_s=0.5), 3.0)
    assert restart.recovered_s is None
    restart.record_progress(_progress(1, 1, first_ago_s=0.25), 4.0)
    assert restart.recovered_s == 3.75
    restart.record_progress(_progress(1, 2, first_ago_s=1.25), 5.0)
    assert restart.recovered_s == 3.75


@pytest.mark.parametrize("wrong", [{"nproc": 0}, {"spares": -1}, {"hang_s": 0}, {"least_ranks": 3}, {"least_ranks": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Job(**{"target": "train.py", "nproc": 2, **wrong})
