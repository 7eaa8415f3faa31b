"""Jobs whose ranks are killed, stopped or fail: what comes out is what an undisturbed job gives, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.blocks.elastic.supervised import TRAIN, messages_of

from flatout.blocks.elastic.policy import JobReport
from flatout.core.records.record import from_json

pytestmark = pytest.mark.long

STEPS = 14
PHASES = [
    {"phase": "forward", "rank": 1, "step": 3},
    {"phase": "backward", "rank": 2, "step": 4},
    {"phase": "optimizer", "rank": 0, "step": 5},
    {"phase": "copy", "rank": 3, "step": 6},
    {"phase": "seal", "rank": 2, "step": 7},
    {"phase": "recovery", "rank": 0, "restart": 5},
    {"phase": "disk", "rank": 1, "restart": 6},
    {"phase": "publish", "rank": 0, "restart": 7},
]
DRAW = random.Random(4)
KILLS = [
    {"phase": "any", "rank": DRAW.randrange(4), "restart": restart, "after_s": DRAW.uniform(0.0, 0.4)}
    for restart in range(6)
]
JOBS: dict[str, dict[str, Any]] = {
    "whole": {"nproc": 4},
    "phases": {"nproc": 4, "plan": PHASES},
    "random": {"nproc": 4, "plan": KILLS},
    "torn": {"nproc": 4, "plan": [{"phase": "forward", "rank": 1, "step": 7, "how": "tear"}]},
    "corrupt": {"nproc": 4, "plan": [{"phase": "forward", "rank": 1, "step": 7, "how": "corrupt"}]},
    "hang": {"nproc": 4, "plan": [{"phase": "backward", "rank": 3, "step": 4, "how": "stop"}], "hang_s": 2.0},
    "bug": {"nproc": 2, "plan": [{"phase": "backward", "rank": 1, "step": 4, "how": "raise", "always": True}]},
    "spare": {"nproc": 4, "spares": 1, "plan": [{"phase": "forward", "device_slot": 1, "always": True}]},
    "fewer": {
        "nproc": 3,
        "least_ranks": 2,
        "plan": [{"phase": "forward", "device_slot": 2, "step": 4, "always": True}],
    },
    "no more": {"nproc": 2, "max_restarts": 0, "plan": [{"phase": "forward", "rank": 1, "step": 4}]},
}
SCRIPT = """
    for name, options in json.loads(sys.argv[2]).items():
        folder = Path(sys.argv[3]) / name.replace(" ", "-")
        folder.mkdir()
        plan = json.dumps(options.pop("plan", []))
        account = supervised(sys.argv[4], folder, sys.argv[5], plan, **options)
        report(json.dumps({"job": name, "account": json.loads(to_json(account)), "left": os.listdir(MEMORY)}))
    print_left = [pid for pid in os.listdir("/proc") if pid.isdecimal() and _parent(pid) == os.getpid()]
    report(json.dumps({"job": "left", "account": None, "left": print_left}))
"""


class Job(NamedTuple):
    """How a job ended, and the loss of each step: all that any rank ever had for it."""

    account: JobReport
    losses: Mapping[int, set[str]]
    left: list[str]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All of the table, one after the other, in one process."""
    folder = tmp_path_factory.mktemp("jobs")
    head = """
    def _parent(pid):
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0
    """

    messages = messages_of(head + SCRIPT, folder / "memory", json.dumps(JOBS), folder, TRAIN, f"{STEPS}")
    assert messages.pop() == {"job": "left", "account": None, "left": []}
    return {
        one["job"]: Job(from_json(json.dumps(one["account"]), JobReport), _losses(folder / one["job"]), one["left"])
        for one in messages
    }


def _losses(folder: Path) -> dict[int, set[str]]:
    losses: dict[int, set[str]] = {}
    for path in Path(str(folder).replace(" ", "-")).glob("log-*"):
        for line in path.read_text().splitlines():
            _, step, _, loss = line.split()
            losses.setdefault(int(step), set()).add(loss)
    return losses


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", ["phases", "random", "torn", "corrupt", "hang", "spare"])
def test_a_job_that_was_disturbed_has_the_losses_of_one_that_was_not(jobs: dict[str, Job], name: str) -> None:
    job = jobs[name]
    assert job.account.outcome == "finished", job.account
    assert job.account.failures
    assert job.losses == jobs["whole"].losses
    assert sorted(job.losses) == list(range(1, STEPS + 1))
    assert all(len(losses) == 1 for losses in job.losses.values())


@pytest.mark.slow
@pytest.mark.multi
def test_killed_in_any_phase_at_most_a_step_is_lost(jobs: dict[str, Job]) -> None:
    assert jobs["whole"].account.failures == ()
    failures = jobs["phases"].account.failures
    assert [f.rank for f in failures] == [entry["rank"] for entry in PHASES]
    assert all(f.kind == "signal" and "SIGKILL" in f.text for f in failures)
    lost = [f.steps_lost or 0 for f in failures]
    assert lost[:5] == [0, 0, 0, 1, 1], "killed while its copy was written, a rank has only the one before"
    assert max(lost) == 1
    assert all(f.recovery_s is not None for f in failures)
    assert all((f.steps_lost or 0) <= 1 for f in jobs["random"].account.failures)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", ["torn", "corrupt"])
def test_a_copy_that_is_not_whole_is_passed_over_for_the_one_before(jobs: dict[str, Job], name: str) -> None:
    (failure,) = jobs[name].account.failures
    assert (failure.reached, failure.resumed) == (7, 6)


@pytest.mark.slow
@pytest.mark.multi
def test_a_rank_that_stops_is_noticed_and_the_job_goes_on(jobs: dict[str, Job]) -> None:
    failure = jobs["hang"].account.failures[0]
    assert failure.kind == "hang" and failure.steps_lost == 0
    assert "no progress of rank" in failure.text


@pytest.mark.slow
@pytest.mark.multi
def test_a_bug_is_given_up_on_with_its_text(jobs: dict[str, Job]) -> None:
    account = jobs["bug"].account
    assert account.outcome == "gave up"
    assert account.why == "3 times in a row without a step of progress, rank 1: ValueError: no number can be 4"
    assert len(account.failures) == 3


@pytest.mark.slow
@pytest.mark.multi
def test_a_slot_that_keeps_failing_is_replaced_by_a_spare_one(jobs: dict[str, Job]) -> None:
    account = jobs["spare"].account
    assert [(f.rank, f.device_slot) for f in account.failures] == [(1, 1)] * 3
    assert account.num_ranks == 4


@pytest.mark.slow
@pytest.mark.multi
def test_without_a_spare_slot_the_job_goes_on_with_fewer_ranks_from_memory(jobs: dict[str, Job]) -> None:
    account = jobs["fewer"].account
    assert account.outcome == "finished"
    assert account.num_ranks == 2
    assert [f.device_slot for f in account.failures] == [2] * 3
    assert account.failures[-1].resumed == 4, "the disk has none yet"
    assert sorted(jobs["fewer"].losses) == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.multi
def test_no_more_restarts_than_allowed(jobs: dict[str, Job]) -> None:
    account = jobs["no more"].account
    assert account.outcome == "gave up" and "as often as allowed" in account.why
    assert "killed by signal 9" in account.why


@pytest.mark.slow
@pytest.mark.multi
def test_nothing_is_left_in_memory(jobs: dict[str, Job]) -> None:
    assert {name: job.left for name, job in jobs.items()} == {name: [] for name in jobs}
