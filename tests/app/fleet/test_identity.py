from __future__ import annotations

import pytest
import torch.distributed as dist

from flatout.app.fleet.identity import JobPlace, job_here, place_here
from flatout.blocks.recording.job_store.policy import FleetPolicy
from flatout.core.records.job import JobRecord

ALONE = JobPlace()


def here(
    environment: dict[str, str], place: JobPlace = ALONE, policy: FleetPolicy | None = None, *arguments: str
) -> JobRecord:
    return job_here(environment, place, policy or FleetPolicy(), began_s=5.0, version="1")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, JobPlace(9, 16, 1, 8)),
        ({"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "8(x2)"}, JobPlace(9, 16, 1, 8)),
        ({}, JobPlace(9, 16, 9, 16)),  # started by torch.multiprocessing: the first one records
    ],
)
def test_a_rank_knows_its_place_from_its_launcher(environment: dict[str, str], place: JobPlace) -> None:
    assert place_here(environment) == place


def test_tasks_of_slurm_without_a_process_group_are_jobs_of_their_own() -> None:
    assert place_here({"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8"}) == ALONE


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCHELASTIC_RUN_ID": "big"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        {"FLATOUT_JOB": "mine"},
    ],
)
def test_nodes_and_restarts_share_the_job_and_no_id(environment: dict[str, str]) -> None:
    one = here({**environment, "SLURMD_NODENAME": "n0"})
    two = here({**environment, "SLURMD_NODENAME": "n1", "TORCHELASTIC_RESTART_COUNT": "2"})
    other = here({key: f"{value}9" for key, value in environment.items()})

    assert one.job == two.job != other.job
    assert len({one.id, two.id, other.id}) == 3
    assert (one.restart, two.restart, one.node, two.node) == (0, 2, "n0", "n1")


def test_a_script_of_its_own_is_a_job_of_its_own() -> None:
    one, two = here({}), here({})

    assert one.job == one.id != two.job
    assert one.workload == two.workload


def test_the_same_work_has_the_same_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    def workload(*arguments: str, place: JobPlace = ALONE, **environment: str) -> str:
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        return here(environment, place).workload

    assert workload("--lr", "1") == workload("--lr", "1")
    assert len({workload("--lr", "1"), workload("--lr", "2"), workload("--lr", "1", place=JobPlace(0, 8, 0, 8))}) == 3
    assert workload("--seed", "1", FLATOUT_WORKLOAD="w") == workload("--seed", "2", FLATOUT_WORKLOAD="w")
    assert workload("--api-key", "a") == workload("--api-key", "b")


def test_the_team_is_what_the_job_says_then_the_policy_then_slurms_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    policy, slurm = FleetPolicy(teams={"vision": ("ada",)}), {"SLURM_JOB_ACCOUNT": "account"}

    assert here(slurm).team == "account"
    assert here(slurm, ALONE, policy).team == "vision"
    assert here(slurm | {"FLATOUT_TEAM": "speech"}, ALONE, policy).team == "speech"
    assert here({}).team == ""
