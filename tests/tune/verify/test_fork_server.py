"""Stages that a server forks: real processes, which see what they would see started from nothing."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from flatout.tune.verify.fork_server import ForkServers, fork_servers
from flatout.tune.verify.side_process import Failed, Request, SideProcess

pytestmark = pytest.mark.slow

if sys.platform != "linux":
    pytest.skip("stages are forked on Linux alone", allow_module_level=True)

SCRIPT = """
    import os, sys, threading
    import torch

    print("argv", sys.argv[1:], "name", __name__, "first", sys.path[0])
    print("variable", open("/proc/self/environ").read().count("FLATOUT_TESTED=yes"))
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(100):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        {then}
"""


@pytest.fixture
def servers(lasting_servers: ForkServers | None) -> ForkServers:
    assert lasting_servers is not None
    return lasting_servers


def request(folder: Path, then: str = "pass", name: str = "train.py", **more: object) -> Request:
    path = folder / name
    path.write_text(textwrap.dedent(SCRIPT).format(then=then))
    return msgspec.structs.replace(Request(target=str(path), num_recorded=2, seed=0, arguments=("--a", "1")), **more)


def output(wanted: Request, servers: ForkServers | None) -> str:
    with SideProcess(wanted, servers) as process:
        process.answer(timeout_s=60.0)
        process.order(3)
        assert process.answer(timeout_s=60.0).num_steps == 5
        return process.output()


@pytest.mark.long
def test_a_forked_script_sees_what_one_started_from_nothing_sees(tmp_path: Path, servers: ForkServers) -> None:
    wanted = request(tmp_path)
    text = output(wanted, servers)
    assert text == output(wanted, None)
    assert "argv ['--a', '1'] name __main__" in text and f"first {tmp_path}" in text and "variable 0" in text


@pytest.mark.long
def test_variables_are_there_before_the_process_begins(tmp_path: Path, servers: ForkServers) -> None:
    """Allocators read theirs then, so that a server is started with them."""
    plain = request(tmp_path)
    assert "variable 0" in output(plain, servers)
    assert "variable 1" in output(msgspec.structs.replace(plain, environment={"FLATOUT_TESTED": "yes"}), servers)
    assert "variable 0" in output(plain, servers)


def test_stages_of_one_server_take_turns(tmp_path: Path, servers: ForkServers) -> None:
    one, two = request(tmp_path, name="one.py"), request(tmp_path, "print('two')", name="two.py")
    with SideProcess(one, servers) as a, SideProcess(two, servers) as b:
        for process in (a, b, a, b):
            if process.answer(timeout_s=60.0).what == "recorded":
                process.order(2)
        assert (a.output().count("two"), b.output().count("two")) == (0, 3)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("os.kill(os.getpid(), 11)", r"was killed by signal 11 \(SIGSEGV\)"),
        ("os._exit(7)", "ended with code 7"),
        ("print('last words', flush=True); os._exit(1)", "last words"),
    ],
)
def test_how_a_forked_stage_ended_is_told(tmp_path: Path, servers: ForkServers, then: str, told: str) -> None:
    with SideProcess(request(tmp_path, then), servers) as process, pytest.raises(Failed, match=told):
        process.answer(timeout_s=60.0)


@pytest.mark.usefixtures("impatient")
def test_a_stage_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, servers: ForkServers) -> None:
    then = "os.fork() or open('child', 'w').write(str(os.getpid())); __import__('time').sleep(600)"
    wanted = request(tmp_path, then.replace("'child'", repr(str(tmp_path / "child"))))
    with SideProcess(wanted, servers) as process, pytest.raises(Failed, match="did not answer"):
        process.answer(timeout_s=2.0)
    pid = int((tmp_path / "child").read_text())
    assert is_gone(pid)


@pytest.mark.long
def test_another_server_is_started_for_one_that_was_killed_and_ends_with_all_that_it_has_forked(tmp_path: Path) -> None:
    servers, wanted = fork_servers(), request(tmp_path)
    assert servers is not None
    with SideProcess(wanted, servers) as process:
        process.answer(timeout_s=60.0)
        [server] = servers._servers.values()
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        with pytest.raises(Failed):
            process.order(3)
            process.answer(timeout_s=60.0)
    with SideProcess(wanted, servers) as process:
        process.answer(timeout_s=60.0)
        process.order(3)
        assert process.answer(timeout_s=60.0).num_steps == 5
        assert "argv" in process.output()
        child = process._child
        assert child is not None and not is_gone(child.pid, within_s=0.0)
        servers.end()
        assert child.wait(10.0) == -signal.SIGKILL
        assert is_gone(child.pid)


def is_gone(pid: int, *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
