"""`flatout tune`, as it is typed: a plan that is proved, or none with the reason; nothing lost when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.command_line import QUICK, flatout

from flatout.app import tune_script
from flatout.app.tune_script import SearchStopped, one_stop
from flatout.core.records.plan import from_toml
from flatout.tune.search import whole_run

SLOW = """
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    x, y = torch.randn(64, 32), torch.randn(64, 1)
    for step in range(20000):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_later_ones_change_nothing(number: signal.Signals) -> None:
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in wanted}
    try:
        with pytest.raises(SearchStopped) as stopped, one_stop():
            os.kill(os.getpid(), number)
            sleep(5)
        for one in wanted:
            os.kill(os.getpid(), one)
        assert stopped.value.exit_code == 128 + number
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_handlers_are_restored_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        term = signal.getsignal(signal.SIGTERM)
        with one_stop():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != term
        assert signal.getsignal(signal.SIGTERM) == term
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def folder(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    (tmp_path / "train.py").write_text(textwrap.dedent(SLOW))
    return tmp_path


def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search in this process without compiling, in short races, and measure the start of a run once."""
    monkeypatch.setattr(tune_script, "_RACE_S", 2.0)
    monkeypatch.setattr(whole_run, "_NUM_STARTS", 1)
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flatout", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUICK, "COLUMNS": "100"},
        start_new_session=True,
    )


@pytest.mark.long
def test_a_slow_script_gets_a_plan_that_is_proved_and_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left after observing is enough to begin a first comparison, whatever that then takes."""
    quick_search(monkeypatch)
    ended = flatout("tune", "--time-budget", "20s", "--timeout", "200", "train.py", folder=folder)
    assert ended.code == 0, ended.err
    assert "x faster" in ended.out
    assert "graph.debug-off" in ended.out
    plan = from_toml((folder / "plan.toml").read_bytes())
    assert "graph.debug-off" in [p.id for p in plan.lever]
    assert plan.measured is not None and plan.measured[1] > 1
    assert plan.proved_on.torch
    measured = [
        p.measured for p in plan.lever if p.measured is not None
    ]  # none for what was tried as one with the next
    assert measured and all(low > 1 for _, low, _ in measured)


@pytest.mark.long
def test_stopped_twice_it_ends_in_order_and_saves_what_was_tried(folder: Path) -> None:
    process = start(folder, "tune", "--time-budget", "30s", "train.py")
    assert _wait_for(lambda: any(p.stat().st_size for p in folder.glob(".plan.*.search-log")), timeout_s=150)
    group = _members(process.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
        sleep(0.2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert "Traceback" not in err
    assert "goes on from there" in err
    assert not (folder / "plan.toml").exists()
    assert list(folder.glob(".plan.*.search-log"))
    assert _wait_for(lambda: not any(map(_is_running, group)), timeout_s=20)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("none.py",), "is not a file"),
        (("--time-budget", "soon", "train.py"), "no time above 0"),
        (("--allow", "everything", "train.py"), "exact, bounded"),
        (("--out", "no/such/plan.toml", "train.py"), "no folder"),
        (("--html", "no/such/found.html", "train.py"), "no folder"),
    ],
)
def test_what_cannot_be_asked_is_refused(folder: Path, arguments: tuple[str, ...], why: str) -> None:
    ended = flatout("tune", *arguments, folder=folder)
    assert ended.code == 2
    assert why in " ".join(ended.err.split())
    assert "Traceback" not in ended.out + ended.err


def _wait_for(condition: object, *, timeout_s: float) -> bool:
    deadline = monotonic() + timeout_s
    assert callable(condition)
    while monotonic() < deadline:
        if condition():
            return True
        sleep(0.2)
    return False


def _members(pid: int) -> list[int]:
    """All descendants of a process, now."""
    found, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if int(fields[1]) == parent:
                child = int(path.parent.name)
                found.append(child)
                frontier.append(child)
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False
