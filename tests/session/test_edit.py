"""`flatout edit`, as it is typed: stdout is a diff, stderr what stays, and the exit code says whether something did."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.records.lever import PlannedLever
from flatout.records.plan import Plan, from_toml, to_toml

SCRIPT = """
    import sys

    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    print("anomaly", torch.is_anomaly_enabled(), "fused", bool(optimizer.defaults["fused"]))
"""
DEBUG_OFF = PlannedLever(id="graph.debug-off", guarantee="exact")
FUSED = PlannedLever(id="parallelism.fused-optimizer", guarantee="bounded")
CHANNELS = PlannedLever(id="memory.channels-last", guarantee="bounded")
GONE = PlannedLever(
    id="memory.gather-once",
    guarantee="exact",
    parameters={"file": "train.py", "function": "main", "code": "bank = torch.cat([bank, row])"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def edit(folder: Path, *arguments: str, levers: tuple[PlannedLever, ...]) -> subprocess.CompletedProcess[str]:
    (folder / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=levers)))
    command = [sys.executable, "-m", "flatout", "edit", "--plan", "plan.toml", "train.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_the_diff_alone_is_printed_and_nothing_is_changed(folder: Path) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, "--", "--lr", "3", levers=(DEBUG_OFF, FUSED))
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "train.py").read_text() == before
    subprocess.run(["patch", "-p1", "-s"], input=done.stdout, text=True, cwd=folder, check=True)
    ran = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout == "anomaly False fused True\n"


def test_what_stays_is_named_and_its_plan_is_written(folder: Path) -> None:
    done = edit(folder, "--write", "--rest", "rest.toml", levers=(DEBUG_OFF, CHANNELS))
    assert done.returncode == 2
    assert "wrote" in done.stderr and "memory.channels-last stays in the plan: " in done.stderr
    assert "anomaly(True)" not in (folder / "train.py").read_text()
    assert from_toml((folder / "rest.toml").read_bytes()).lever == (CHANNELS,)


def test_a_plan_of_another_text_is_refused_in_one_line(folder: Path) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, "--write", levers=(DEBUG_OFF, GONE))
    assert (done.returncode, done.stdout) == (2, "")
    assert "another text" in done.stderr and "Traceback" not in done.stderr
    assert (folder / "train.py").read_text() == before


def test_copies_go_where_they_are_wanted(folder: Path) -> None:
    assert edit(folder, "--into", "edited", levers=(FUSED,)).returncode == 0
    assert "fused=True" in (folder / "edited" / "train.py").read_text()
    assert "fused=True" not in (folder / "train.py").read_text()
    assert edit(folder, "--into", "edited", "--write", levers=(FUSED,)).returncode == 2
