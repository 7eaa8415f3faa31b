"""A credential among a script's arguments is in nothing that is written, and the script still gets it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import QUICK

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan, from_toml, to_toml

pytestmark = pytest.mark.slow

SECRET = "correct-horse-battery-staple"
SCRIPT = f"""
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
parser.add_argument("--db")
arguments = parser.parse_args()
assert arguments.api_key == {SECRET[::-1]!r}[::-1] and arguments.db.endswith("@host/runs")
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(40):
    loss = net(torch.randn(16, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
raise RuntimeError(f"cannot send to {{arguments.db}}")
"""
ARGUMENTS = ("--api-key", SECRET, "--db", f"postgres://me:{SECRET}@host/runs")


def flatout(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-c", "from flatout.app.cli import main; main()", *words],
        cwd=folder,
        env={**os.environ, **QUICK, "XDG_CACHE_HOME": str(folder / "cache"), "WANDB_API_KEY": SECRET, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.long
def test_no_report_has_it(tmp_path: Path, cache_home: Path) -> None:
    shutil.copytree(cache_home, tmp_path / "cache")  # in which this machine was measured
    outputs = [("--json", "r.json"), ("--html", "r.html"), ("--markdown", "r.md")]
    done = flatout(tmp_path, "check", *(word for pair in outputs for word in pair), "train.py", "--", *ARGUMENTS)
    assert "cannot send to" in done.stderr, done.stderr[-2000:]
    for _, name in outputs:
        assert "train.py" in (tmp_path / name).read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in written if SECRET.encode() in path.read_bytes()] == []
    assert "<left out>" in (tmp_path / "r.json").read_text()


@pytest.mark.long
def test_a_plan_without_it_runs_the_script_with_it(tmp_path: Path) -> None:
    lever = PlannedLever(id="parallelism.fused-optimizer", guarantee="bounded")
    plan = Plan(script="train.py", arguments=("--api-key", "<left out>"), lever=(lever,))
    (tmp_path / "plan.toml").write_bytes(to_toml(plan))
    done = flatout(tmp_path, "run", "--plan", "plan.toml", "train.py", "--", *ARGUMENTS)
    assert "cannot send to" in done.stderr, done.stderr[-2000:]
    assert "met nothing to change" not in done.stderr
    assert from_toml((tmp_path / "plan.toml").read_bytes()) == plan


def test_an_edit_asks_for_what_its_plan_has_not(tmp_path: Path) -> None:
    plan = Plan(script="train.py", arguments=("--api-key", "<left out>"))
    (tmp_path / "plan.toml").write_bytes(to_toml(plan))
    done = flatout(tmp_path, "edit", "--plan", "plan.toml", "train.py")
    assert done.returncode == 2
    assert "give the script's own arguments after `--`" in " ".join(done.stderr.split())
