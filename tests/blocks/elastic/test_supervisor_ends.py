"""The end of a supervisor, and what the command line does: nothing is lost but a step, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from tests.blocks.elastic.supervised import TRAIN, messages_of
from tests.blocks.elastic.two_nodes import addresses_listened_at, tree

from flatout.blocks.elastic.node import NodeMemory
from flatout.core.errors import UsageError

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "survive-failures.md"

SCRIPT = """
    import threading
    folder, train = Path(sys.argv[2]), sys.argv[3]

    def begin(name):
        (folder / name).mkdir()
        return str(folder / name)

    # a supervisor that is told to end, and one that is killed
    for name, number in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
        where = begin(name)
        one = os.fork()
        if not one:
            account = supervised(train, where, "1000000", "[]", nproc=2)
            os._exit({"stopped": 10}.get(account.outcome, 11))
        while not all((Path(where) / f"log-{r}").exists() and (Path(where) / f"log-{r}").stat().st_size for r in (0, 1)):
            time.sleep(0.05)
        os.kill(one, number)
        code = os.waitstatus_to_exitcode(os.waitpid(one, 0)[1])
        deadline = time.monotonic() + 20
        while (left := [p for p in os.listdir(MEMORY) if p.startswith("flatout-")]) and time.monotonic() < deadline:
            time.sleep(0.05)
        sizes = [(Path(where) / "log-0").stat().st_size]
        time.sleep(0.3)
        sizes.append((Path(where) / "log-0").stat().st_size)
        report(json.dumps([name, code, left, sizes[0] == sizes[1]]))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nodes")
    messages = messages_of(SCRIPT, folder / "memory", folder, TRAIN)
    return {"folder": folder, **{one[0]: one[1:] for one in messages}}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("name", "code"), [("stopped", 10), ("killed", -signal.SIGKILL)])
def test_a_supervisor_that_ends_leaves_nothing_behind(reports: dict[str, Any], name: str, code: int) -> None:
    assert reports[name] == [code, [], True]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
def test_the_example_of_the_page_survives_a_kill_on_the_command_line(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "train.py").write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[2] / "src")}
    command = [sys.executable, "-m", "flatout.app.cli", "survive", "--nproc", "2", "--memory-folder", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--json", "account.json", "train.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        rank = _rank_of(process, tmp_path)
        listening = addresses_listened_at([process.pid, *tree(process.pid)])
        os.kill(rank, signal.SIGKILL)
        messages, wrong = process.communicate(timeout=100)
    assert process.returncode == 0, wrong[-2000:]
    assert "killed by signal 9 (SIGKILL)" in wrong and "finished on 2 ranks" in wrong
    assert listening and all(address.startswith("127.") for address in listening), "no other machine reaches any of it"
    (failure,) = json.loads((tmp_path / "account.json").read_text())["failures"]
    assert failure["resumed"] > 0
    assert f"from step {failure['resumed']}" in messages
    assert not list(tmp_path.glob("flatout-survive-*"))


def _rank_of(supervisor: subprocess.Popen[str], folder: Path) -> int:
    """A rank of the job that runs, once there are copies of its state."""
    deadline = monotonic() + 90
    while monotonic() < deadline and supervisor.poll() is None:
        sleep(0.02)
        if len(list(folder.glob("flatout-survive-*/own-*.1"))) == 2:
            (fork_server,) = _children(supervisor.pid)
            return max(_children(fork_server))
    raise AssertionError("the job did not begin")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_a_killed_owner_has_left_in_memory_is_removed_by_the_next(tmp_path: Path) -> None:
    with NodeMemory(tmp_path) as mine:
        left = tmp_path / "flatout-survive-left"
        left.mkdir()
        (left / "lock").write_text("")
        (left / "own-00000-of-00001.0").write_text("x")
        with NodeMemory(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([mine.path, other.path])
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder to write to"):
        NodeMemory(tmp_path / "none")
