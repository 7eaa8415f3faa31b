"""Agents that are started again, and what is left of those that were killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import get_args

import pytest
from tests.blocks.elastic.two_nodes import RANKS, Recovery, TwoNodes, What

from flatout.blocks.elastic.agents import known_agent

AGENT = """
import os, signal, sys, time
from flatout.blocks.elastic.agents import watch_agent
from torch.distributed import DistStoreError
folder, how = sys.argv[1], sys.argv[2]

def run(connection):
    with open(f"{folder}/agents", "a") as file:
        file.write(f"{os.getpid()}\\n")
    number = len(open(f"{folder}/agents").read().split())
    if how == "killed" and number < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lost" and number < 3:
        raise DistStoreError("gone")
    if how == "always killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise SystemExit(3)
    if how == "ends slowly":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(75)))
        open(f"{folder}/ready", "w")
        time.sleep(60)
    if how == "waits":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(41))
        open(f"{folder}/ready", "w")
        time.sleep(60)

def serve(connection):
    connection.recv(1)

os._exit(watch_agent(run, serve, restarts=2, on_restart=lambda text: print(text, flush=True)))
"""


def watched(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    (tmp_path / "agent.py").write_text(AGENT)
    words = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path), how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "starts", "says"),
    [
        ("ends", 0, 1, ""),
        ("killed", 0, 3, "the agent was killed by signal 9; another one starts"),
        ("lost", 0, 3, "the agent has lost its rendezvous; another one starts"),
        ("always killed", 128 + 9, 3, "the agent was killed by signal 9"),
        ("fails", 3, 1, ""),
    ],
)
def test_an_agent_starts_again_when_it_was_killed_or_has_lost_its_rendezvous(
    tmp_path: Path, how: str, code: int, starts: int, says: str
) -> None:
    process = watched(tmp_path, how)
    out, wrong = process.communicate(timeout=60)
    assert (process.returncode, len((tmp_path / "agents").read_text().split())) == (code, starts), wrong
    assert says in out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGUSR1, 41)])
def test_signals_go_on_to_the_agent_which_is_not_started_again(tmp_path: Path, number: int, code: int) -> None:
    process = watched(tmp_path, "waits")
    while not (tmp_path / "ready").exists():
        sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert len((tmp_path / "agents").read_text().split()) == 1


@pytest.mark.slow
def test_a_signal_that_comes_twice_does_not_end_the_launcher_before_its_agent(tmp_path: Path) -> None:
    process = watched(tmp_path, "ends slowly")
    while not (tmp_path / "ready").exists():
        sleep(0.05)
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        sleep(0.1)
    process.communicate(timeout=60)
    assert process.returncode == 75


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
def test_a_job_goes_on_whatever_is_killed_with_the_same_losses(tmp_path: Path) -> None:
    chance = random.Random(0)
    with TwoNodes(tmp_path / "job", steps=150, options=("--agent-restarts", "9")) as job:
        found: list[Recovery] = [job.killed(what, chance) for what in get_args(What)]
        job.finish()
        losses = job.losses()
    with TwoNodes(tmp_path / "whole", steps=150, pace_s=0.0) as whole:
        whole.finish()
        assert losses == whole.losses()
    assert max(one.steps_lost for one in found) <= 1
    assert all(len(of_rank) == 150 for of_rank in losses) and len(losses) == RANKS


# -- agents that died here ---------------------------------------------------------------------------------------------------


def _died(run_id: str, how: str, folder: Path) -> int:
    """The process of an agent of that run that is gone, or is there still."""
    code = f"""
import os, signal, time
from flatout.blocks.elastic.agents import known_agent
with known_agent({run_id!r}, "here"):
    open({str(folder)!r} + f"/{{os.getpid()}}", "w")
    {how}
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (folder / f"{process.pid}").exists():
        sleep(0.05)
    if "sleep" not in how:
        process.wait()
    else:
        process.returncode = 0  # the test ends it
    return process.pid


@pytest.mark.slow
def test_the_rendezvous_forgets_agents_that_were_killed_here_and_no_others(tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    run_id = f"run {os.getpid()}"
    lives = _died(run_id, "time.sleep(600)", tmp_path)
    killed = _died(run_id, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    other = _died(f"another {run_id}", "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    try:
        now = datetime.now(UTC)
        nodes = {
            name: torchs._NodeDesc(address, pid, 0)
            for name, address, pid in (
                ("killed", "here", killed),
                ("lives", "here", lives),
                ("of another run", "here", other),
                ("of another machine", "there", killed),
            )
        }
        before = torchs._BackendRendezvousStateHolder._sanitize
        with known_agent(run_id, "here"):
            settings = torchs.RendezvousSettings(run_id, 1, 9, torchs.RendezvousTimeout(), _seconds(5), 3)
            holder = torchs._BackendRendezvousStateHolder(None, settings)  # type: ignore[arg-type]
            holder._state.last_heartbeats = dict.fromkeys(nodes.values(), now)
            holder._state.participants = {node: n for n, node in enumerate(nodes.values())}
            holder._sanitize()
            assert set(holder._state.participants) == {node for name, node in nodes.items() if name != "killed"}
        assert torchs._BackendRendezvousStateHolder._sanitize is before
    finally:
        os.kill(lives, signal.SIGKILL)
        with known_agent(f"another {run_id}", "here"):
            pass
        for path in Path("/dev/shm").glob(f"flatout-agent-*-{lives}"):
            path.unlink()


def _seconds(number: float) -> object:
    from datetime import timedelta

    return timedelta(seconds=number)


@pytest.mark.slow
def test_an_agent_that_has_the_number_of_a_dead_one_is_not_forgotten(tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    run_id = f"reused {os.getpid()}"
    killed = _died(run_id, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    node = torchs._NodeDesc("here", killed, 0)
    settings = torchs.RendezvousSettings(run_id, 1, 9, torchs.RendezvousTimeout(), _seconds(5), 3)  # type: ignore[arg-type]
    holder = torchs._BackendRendezvousStateHolder(None, settings)  # type: ignore[arg-type]
    with known_agent(run_id, "here"):
        (mine,) = Path("/dev/shm").glob(f"flatout-agent-*-{os.getpid()}")
        another = mine.with_name(mine.name.replace(f"-{os.getpid()}", f"-{killed}"))
        try:
            # what an agent with that number writes; it has to live, so this process stands for it
            identity = json.loads(mine.read_text())
            for is_there in (True, False):
                another.write_text(json.dumps(identity)) if is_there else another.unlink()
                holder._state.last_heartbeats = {node: datetime.now(UTC)}
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("flatout.blocks.elastic.agents._identity", lambda pid: identity)
                    holder._sanitize()
                assert (node in holder._state.last_heartbeats) is is_there
        finally:
            another.unlink(missing_ok=True)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[null, 2, 3, 4]", json.dumps([1, 2, 3])])
def test_a_file_that_is_no_agents_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    from flatout.blocks.elastic import agents

    monkeypatch.setattr(agents, "_SHARED", tmp_path)
    (tmp_path / "flatout-agent-xyz").write_text(text)
    with known_agent("run", None):
        assert len(list(tmp_path.glob("flatout-agent-*"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["flatout-agent-xyz"]
