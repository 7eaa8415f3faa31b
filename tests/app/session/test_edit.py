"""`flatout edit`, as it is typed: stdout is a diff, stderr what stays, and the exit code says whether something did."""

from __future__ import annotations

import runpy
import subprocess
import textwrap
from pathlib import Path

import pytest
from tests.command_line import Ended, flatout

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan, from_toml, to_toml

pytestmark = pytest.mark.slow

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


def edit(folder: Path, *arguments: str, levers: tuple[PlannedLever, ...]) -> Ended:
    (folder / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=levers)))
    return flatout("edit", "--plan", "plan.toml", "train.py", *arguments, folder=folder)


def test_the_diff_alone_is_printed_and_nothing_is_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, "--", "--lr", "3", levers=(DEBUG_OFF, FUSED))
    assert (done.code, done.err) == (0, "")
    assert (folder / "train.py").read_text() == before
    subprocess.run(["patch", "-p1", "-s"], input=done.out, text=True, cwd=folder, check=True)
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert capsys.readouterr().out == "anomaly False fused True\n"


def test_what_stays_is_named_and_its_plan_is_written(folder: Path) -> None:
    done = edit(folder, "--write", "--rest", "rest.toml", levers=(DEBUG_OFF, CHANNELS))
    assert done.code == 2
    assert "wrote" in done.err and "memory.channels-last stays in the plan: " in done.err
    assert "anomaly(True)" not in (folder / "train.py").read_text()
    assert from_toml((folder / "rest.toml").read_bytes()).lever == (CHANNELS,)


def test_a_plan_of_another_text_is_refused_in_one_line(folder: Path) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, "--write", levers=(DEBUG_OFF, GONE))
    assert (done.code, done.out) == (2, "")
    assert "another text" in done.err and "Traceback" not in done.err
    assert (folder / "train.py").read_text() == before


def test_copies_go_where_they_are_wanted(folder: Path) -> None:
    assert edit(folder, "--into", "edited", levers=(FUSED,)).code == 0
    assert "fused=True" in (folder / "edited" / "train.py").read_text()
    assert "fused=True" not in (folder / "train.py").read_text()
    assert edit(folder, "--into", "edited", "--write", levers=(FUSED,)).code == 2
