"""How `flatout check` ends a script, and what a script that is ended from outside leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from tests.command_line import QUICK

pytestmark = pytest.mark.slow

Check = Callable[..., Any]

ENDLESS = """
    import torch
    from torch import nn
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    step = 0
    while True:
        step += 1
        net(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()
        if step == 40:
            print("forty", flush=True)
"""
STUBBORN = """
    import atexit, signal, subprocess, sys, threading, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: print("trapped", flush=True))
    class Rows(Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, i):
            return torch.randn(16)
    if __name__ == "__main__":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("pid", child.pid, flush=True)
        threading.Thread(target=lambda: [time.sleep(0.1) for _ in range(10_000)]).start()
        atexit.register(print, "last words")
        net = nn.Linear(16, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        step = 0
        while True:
            try:
                for x in DataLoader(Rows(), batch_size=16, num_workers=1):
                    net(x).mean().backward()
                    optimizer.step()
                    step += 1
                    if step == 60:
                        print("forty", flush=True)
            except BaseException as e:
                print("swallowed", repr(e), flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started_by(out: str) -> int:
    return int(next(line for line in out.splitlines() if line.startswith("pid ")).removeprefix("pid "))


IMPATIENT = "from flatout.app import observed; observed._PATIENCE_S = 1.5"
"""What does not end by itself is killed soon."""


def ended_by(
    folder: Path, cache: Path, script: str, *numbers: int, before: str = ""
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and JSON of a check that gets these signals when its script has made some steps."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    main = f"{before}; from flatout.app.cli import main; main()".removeprefix("; ")
    options = ["--seconds", "90", "--no-trials", "--json", "report.json", "--html", "report.html"]
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", main, "check", *options, "train.py"],
            cwd=folder,
            env={**os.environ, **QUICK, "XDG_CACHE_HOME": str(cache), "COLUMNS": "100"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    end = monotonic() + 60
    while "forty" not in (folder / "out").read_text() and monotonic() < end:
        sleep(0.1)
    for number in numbers:
        process.send_signal(number)
        sleep(0.5)
    code = process.wait(timeout=60)
    assert (folder / "report.html").exists(), (folder / "out").read_text()
    return code, (folder / "out").read_text(), json.loads((folder / "report.json").read_text())


@pytest.mark.long
def test_a_script_is_ended_when_the_report_is_ready_and_prints_nothing_more(check: Check) -> None:
    ran = check(ENDLESS, "--stop", "--no-trials", "--seconds", "0.5")

    assert ran.code == 0, ran.err
    assert "--stop is not needed" in ran.err, "the option of before changes nothing"
    assert "forty" in ran.out.partition("a training step")[0]
    assert "ended when this report was ready" in ran.out
    assert ran.report["evidence"]["exit"] == "stopped"


@pytest.mark.long
def test_a_stubborn_script_is_ended_with_all_that_it_has_started(check: Check) -> None:
    ran = check(STUBBORN, "--no-trials", "--seconds", "0.5", before=IMPATIENT)

    assert ran.code == 0, ran.err
    assert "swallowed" not in ran.out
    assert "last words" not in ran.out
    assert "Traceback" not in ran.err
    assert not is_running(started_by(ran.out))


@pytest.mark.long
def test_a_script_that_is_to_keep_running_runs_to_its_own_end(check: Check) -> None:
    script = textwrap.dedent(ENDLESS).replace("while True:", "while step < 3000:") + "print('the end of', step)\n"

    ran = check(script, "--no-trials", "--seconds", "0.2", "--keep-running")

    assert ran.code == 0, ran.err
    assert "the end of 3000" in ran.out
    assert ran.report["evidence"]["exit"] in ("", "finished")


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((signal.SIGTERM,), "SIGTERM"),
        pytest.param((signal.SIGHUP,), "SIGHUP", marks=pytest.mark.long),
        pytest.param((signal.SIGINT, signal.SIGINT), "SIGINT", marks=pytest.mark.long),
    ],
    ids=["SIGTERM", "SIGHUP", "second Ctrl-C"],
)
def test_a_signal_leaves_the_report_the_page_and_the_exit_code_of_the_shell(
    tmp_path: Path, cache_home: Path, numbers: tuple[int, ...], name: str
) -> None:
    code, out, report = ended_by(tmp_path, cache_home, ENDLESS, *numbers)

    assert code == 128 + numbers[0]
    assert report["evidence"]["exit"] == f"ended by {name}"
    assert report["evidence"]["steps"]["num_timed"] > 0
    assert "a training step" in out
    assert "Traceback" not in out


@pytest.mark.long
def test_a_script_that_traps_the_signal_leaves_a_report_too(tmp_path: Path, cache_home: Path) -> None:
    code, out, report = ended_by(tmp_path, cache_home, STUBBORN, signal.SIGTERM, before=IMPATIENT)

    assert code == 128 + signal.SIGTERM
    assert "trapped" in out
    assert "a training step" in out
    assert report["evidence"]["exit"] == "ended by SIGTERM"
    assert not is_running(started_by(out))


@pytest.mark.long
def test_a_script_that_is_killed_leaves_what_its_close_looks_had_shown(check: Check) -> None:
    script = textwrap.dedent(ENDLESS) + "    if step == 200:\n        import os, signal; os.kill(os.getpid(), 9)\n"

    ran = check(script)

    assert ran.code == 128 + signal.SIGKILL
    assert "a training step" in ran.out
    assert any("killed" in note for note in ran.report["evidence"]["notes"])
