"""Ranks that torchrun starts again go on from memory; and the folder where their copies lie."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.blocks.elastic.supervised import TRAIN
from torch import nn

from flatout.blocks.elastic import launched
from flatout.blocks.elastic.launched import LaunchedContext, job_of, launched_context
from flatout.blocks.elastic.survivor import Survivor
from flatout.blocks.parallel.own_store import own_store
from flatout.core.errors import CheckpointError, UsageError

NOW_S = time.time  # noqa: TID251  # a file has the wall clock's time

STEPS = 14
KILLS = [
    {"phase": "forward", "rank": 1, "step": 5},
    {"phase": "seal", "rank": 0, "step": 9},
    {"phase": "backward", "rank": 0, "step": 12},
]


def torchrun(module: str, folder: Path, plan: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    memory = folder / "memory"
    memory.mkdir(parents=True)
    options = json.dumps({"disk_every": 100, "memory": str(memory)})
    given = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "5", "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", module, *given]
    command += [str(TRAIN), str(folder), f"{STEPS}", json.dumps(plan), options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize("module", ["torch.distributed.run", "flatout.blocks.elastic.torchrun"])
def test_under_torchrun_killed_ranks_go_on_from_memory_bit_for_bit(tmp_path: Path, module: str) -> None:
    for name, plan in (("whole", []), ("killed", KILLS)):
        ended = torchrun(module, tmp_path / name, plan)
        assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in range(2):
        whole, killed = (
            [line.split() for line in (tmp_path / name / f"log-{rank}").read_text().splitlines()]
            for name in ("whole", "killed")
        )
        assert {(step, loss) for _, step, _, loss in killed} == {(step, loss) for _, step, _, loss in whole}
        assert [int(step) for _, step, _, _ in whole] == list(range(1, STEPS + 1))
        starts = sorted({int(start) for start, *_ in killed})
        assert starts == [0, 1, 2, 3]
        done_twice = len(killed) - STEPS
        assert done_twice <= len(KILLS)  # no more than a step is lost each time; the disk has none before the end
    assert not list(tmp_path.glob("*/memory/*"))  # removed by the last rank that ended


def two_agents(folder: Path, plan: list[dict[str, Any]]) -> list[set[tuple[str, str]]]:
    """Two nodes of two ranks on one machine, which share no memory; each rank's steps and losses."""
    memory = folder / "memory"
    memory.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = f"--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id two"
    command = [sys.executable, "-m", "flatout.blocks.elastic.torchrun", *words.split(), "--max-restarts", "9"]
    command += ["--monitor-interval", "0.1", str(TRAIN), str(folder), f"{STEPS}", json.dumps(plan)]
    command += [json.dumps({"disk_every": 100, "memory": str(memory)})]
    agents = [
        subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1", "FLATOUT_NODE": node}, stderr=subprocess.DEVNULL
        )
        for node in "ab"
    ]
    assert [agent.wait(250) for agent in agents] == [0, 0]
    assert not list(memory.iterdir())
    logs = [(folder / f"log-{rank}").read_text().splitlines() for rank in range(4)]
    return [{(line.split()[1], line.split()[3]) for line in log} for log in logs]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_of_two_nodes_go_on_from_memory_bit_for_bit(tmp_path: Path) -> None:
    plan = [{"phase": "forward", "rank": 3, "step": 4}, {"phase": "optimizer", "rank": 0, "step": 9}]
    assert two_agents(tmp_path / "killed", plan) == two_agents(tmp_path / "whole", [])


@pytest.fixture
def there(tmp_path: Path) -> Path:
    memory = tmp_path / "memory"
    memory.mkdir()
    return memory


RUN = {"TORCHELASTIC_RUN_ID": "big", "TORCHELASTIC_RESTART_COUNT": "2", "RANK": "0", "LOCAL_RANK": "0"}


def context_in(memory: Path, training: str = "", **environment: str) -> LaunchedContext:
    found = launched_context(memory, training, RUN | environment)
    assert found is not None
    return found


def end(context: LaunchedContext) -> None:
    os.close(context.lock)
    os.close(context.rank_lock)


def test_a_folder_is_found_again_by_job_training_and_node(there: Path) -> None:
    first = context_in(there)
    end(first)
    assert (first.restart, first.row) == (2, 0)
    again = context_in(there, TORCHELASTIC_RESTART_COUNT="3")
    assert (again.memory, again.job) == (first.memory, first.job)
    end(again)
    others = [
        context_in(there, training="/other"),
        context_in(there, TORCHELASTIC_RUN_ID="small"),
        context_in(there, FLATOUT_NODE="b"),
    ]
    assert len({one.memory for one in (first, *others)}) == 4
    assert others[2].job == first.job and others[2].node != first.node
    assert launched_context(there, "", {}) is None


def test_the_name_of_a_job() -> None:
    assert job_of({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "9"}) == "slurm 9"
    assert job_of({"SLURM_JOB_ID": "9"}) is None  # a shell in an allocation is no rank
    unnamed = job_of({"TORCHELASTIC_RUN_ID": "none"})
    assert unnamed is not None and str(os.getppid()) in unnamed


def test_a_rank_that_was_left_behind_is_named(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_DYING_S", 0.2)
    left = context_in(there)
    with pytest.raises(UsageError, match=f"process {os.getpid()} is rank 0 of this job, too"):
        context_in(there)
    end(left)
    end(context_in(there))


def test_a_folder_of_somebody_else_is_not_used(there: Path, tmp_path: Path) -> None:
    folder = context_in(there).memory
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not this user's alone"):
        context_in(there)
    folder.unlink()
    folder.mkdir(mode=0o755)
    with pytest.raises(UsageError, match="is not this user's alone"):
        context_in(there)
    with pytest.raises(UsageError, match="is no folder to write to"):
        context_in(there / "nowhere")


def test_what_a_job_left_long_ago_is_removed_and_what_lives_is_not(there: Path) -> None:
    old, alive, fresh = (context_in(there, TORCHELASTIC_RUN_ID=name) for name in ("old", "alive", "fresh"))
    end(old)
    end(fresh)
    for context in (old, alive):
        os.utime(context.memory, (NOW_S() - 7200,) * 2)
    context_in(there, TORCHELASTIC_RUN_ID="next")
    assert not old.memory.exists()
    assert alive.memory.exists() and fresh.memory.exists()
    alive.reach(4)  # a step is a sign of life
    assert NOW_S() - alive.memory.stat().st_mtime < 60


def parts_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"net": nn.Linear(4, 3)}


def test_without_room_the_disk_alone_is_left(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(LaunchedContext, "room_bytes", lambda self: 50.0)
    state = Survivor(tmp_path / "disk", disk_every=1, memory=there)
    with pytest.warns(UserWarning, match="no copies are kept in memory"):
        state.keep(1, **parts_of())
    state.keep(2, **parts_of())
    state.close()
    assert not list(there.glob("*/own-*"))
    again = parts_of(1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    with Survivor(tmp_path / "disk", memory=None) as state:
        assert state.resume(**again) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "third")
    with pytest.raises(CheckpointError, match="there is no folder on a disk"):
        Survivor(None, memory=there).keep(1, **parts_of())


def test_a_training_goes_on_from_memory_alone(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RUN.items():
        monkeypatch.setenv(name, value)
    first = Survivor(None, memory=there)
    parts = parts_of()
    first.keep(7, **parts)
    assert isinstance(first._context, LaunchedContext)
    end(first._context)  # as the system does when the process is gone
    again = parts_of(1)
    assert Survivor(None, memory=there).resume(**again) == 7
    assert torch.equal(again["net"].weight, parts["net"].weight)


# -- a store of one start ----------------------------------------------------------------------------------------------------


def met(store: dist.Store, num_ranks: int, *, late_s: float = 0.0) -> list[str]:
    """What each rank reads of what rank 0 wrote."""
    found = [""] * num_ranks

    def rank(number: int) -> None:
        time.sleep(late_s * (number == 0))
        mine = own_store(store, number, num_ranks, patience_s=20.0)
        if number == 0:
            mine.set("address", f"{time.monotonic()}")
        mine.wait(["address"], timedelta(seconds=20))
        found[number] = mine.get("address").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return found


def test_each_start_has_a_store_of_its_own() -> None:
    store = dist.HashStore()
    starts = [met(store, 3), met(store, 3, late_s=0.3), met(store, 2)]
    assert all(len(set(start)) == 1 and start[0] for start in starts)
    assert len({start[0] for start in starts}) == 3


def test_ranks_that_are_gone_are_not_waited_for_with_those_that_came() -> None:
    store = dist.HashStore()
    for rank in range(3):  # of a start that was killed before its ranks had met
        store.set(f"flatout/start/hello/{rank}", f"{rank}" * 32)
    assert len(set(met(store, 3, late_s=0.2))) == 1
    with pytest.raises(UsageError, match="did not find one another: of 2 ranks some did not come"):
        own_store(dist.HashStore(), 0, 2, patience_s=0.1)
