"""torchrun with forks: what scripts see, how they end, and what happens when the process that forks is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep

import pytest

from flatout.blocks.elastic.preloaded import PreloadedServer

TORCH, OURS = "torch.distributed.run", "flatout.blocks.elastic.torchrun"
SEES = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME"
names += " TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS"
seen = {name: os.environ.get(name) for name in names.split()}
import __main__, helper, torch
seen |= {"argv": sys.argv, "name": __name__, "main": __main__.__dict__ is globals(), "file": __file__, "helper": helper.HERE}
seen |= {"folder": os.getcwd(), "stdin": sys.stdin.read(), "error file": "TORCHELASTIC_ERROR_FILE" in os.environ}
seen["threads"] = torch.get_num_threads()
print(json.dumps(seen))
print("to err", file=sys.stderr)
"""
FAILS = """
import os, signal, sys, time
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
how = sys.argv[1]
if how == "exit" and rank == 1:
    sys.exit(3)
if how == "raise" and rank == 1:
    raise ValueError("no such thing")
if how == "server" and start == 0 and rank == 0:
    os.kill(os.getppid(), signal.SIGKILL)
if how == "joins":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if start < 2 and rank == start:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"total {int(total)}", flush=True)
    dist.destroy_process_group()
if how == "sleep" or (how in ("exit", "raise") and rank == 0) or (how == "server" and start == 0):
    time.sleep(60)
print(f"start {start} rank {rank} done", flush=True)
"""


def launched(module: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        module,
        "--rdzv-id",
        "job",
        "--nproc-per-node",
        "2",
        "--monitor-interval",
        "0.1",
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(600):
        if is_so():
            return
        sleep(0.1)
    raise AssertionError("it did not come to that within a minute")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sees.py").write_text(SEES)
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "helper.py").write_text("HERE = __file__")
    return tmp_path


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("script", [["sees.py"], ["-m", "sees"]])
def test_a_script_sees_what_it_sees_under_torchrun(folder: Path, script: list[str]) -> None:
    found = []
    for module in (TORCH, OURS):
        ended = launched(module, "--redirects", "3", "--log-dir", module, *script, "--epochs", "3", folder=folder)
        assert ended.returncode == 0, ended.stderr[-2000:]
        logs = sorted((folder / module).rglob("stdout.log"))
        assert len(logs) == 2
        assert [path.read_text() for path in sorted((folder / module).rglob("stderr.log"))] == ["to err\n"] * 2
        found.append([json.loads(path.read_text()) for path in logs])
    stores = [[one.pop("TORCHELASTIC_USE_AGENT_STORE") for one in of_launcher] for of_launcher in found]
    assert stores == [["True", "True"], ["False", "False"]], "ours makes a store for each start of the ranks"
    assert found[0] == found[1]
    assert found[0][1]["argv"][1:] == ["--epochs", "3"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("how", "words"), [("exit", "exitcode  : 3"), ("raise", "exitcode  : 1")])
def test_a_rank_that_fails_ends_the_job_as_under_torchrun(folder: Path, how: str, words: str) -> None:
    ended = launched(OURS, "--max-restarts", "1", "fails.py", how, folder=folder)
    assert ended.returncode == 1
    assert words in ended.stderr and "rank      : 1" in ended.stderr
    if how == "raise":
        assert "ValueError: no such thing" in ended.stderr


@pytest.mark.slow
@pytest.mark.multi
def test_when_the_process_that_forks_is_killed_another_one_forks(folder: Path) -> None:
    ended = launched(OURS, "--max-restarts", "2", "fails.py", "server", folder=folder)
    assert ended.returncode == 0, ended.stderr[-2000:]
    done = re.findall(r"start 1 rank \d done", ended.stdout)  # both ranks may write before the first ends its line
    assert sorted(done) == ["start 1 rank 0 done", "start 1 rank 1 done"]


@pytest.mark.slow
@pytest.mark.multi
def test_ranks_that_join_by_themselves_find_nothing_of_the_start_before(folder: Path) -> None:
    ended = launched(OURS, "--max-restarts", "2", "fails.py", "joins", folder=folder)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("total 2") == 2


@pytest.mark.slow
@pytest.mark.multi
def test_what_is_no_python_is_started_as_torchrun_does(folder: Path) -> None:
    ended = launched(OURS, "--no-python", "echo", "hello", folder=folder)
    assert (ended.returncode, ended.stdout) == (0, "hello\nhello\n")


@pytest.mark.slow
@pytest.mark.multi
def test_its_ranks_die_with_the_agent(folder: Path) -> None:
    command = [sys.executable, "-m", OURS, "--nproc-per-node", "2", "fails.py", "sleep"]
    agent = subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    wait_until(lambda: len(children_of(agent.pid)) == 1 and len(children_of(children_of(agent.pid)[0])) == 2)
    server = children_of(agent.pid)[0]
    forks = children_of(server)
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in (server, *forks)))


# -- the server that forks ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fork_ends_as_a_process_of_its_own_would(folder: Path) -> None:
    (folder / "one.py").write_text("import os, sys\nprint(os.environ['HERE'], sys.argv)\nsys.exit(int(sys.argv[1]))")
    (folder / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    with PreloadedServer(os.environ) as server:
        out = folder / "out"
        given = {"is_module": False, "environment": {"HERE": "there"}, "stdout": str(out)}
        first = server.fork(str(folder / "one.py"), ["5"], **given)  # type: ignore[arg-type]
        assert first.wait(60) == 5
        assert out.read_text() == f"there {[str(folder / 'one.py'), '5']}\n"
        long = server.fork(str(folder / "long.py"), [], **given)  # type: ignore[arg-type]
        wait_until(lambda: out.read_text() == "begun\n")
        assert long.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            long.wait(0.1)
        os.killpg(long.pid, signal.SIGTERM)
        assert long.wait(60) == -signal.SIGTERM
        missing = server.fork(str(folder / "none.py"), [], **given)  # type: ignore[arg-type]
        assert missing.wait(60) == 2
