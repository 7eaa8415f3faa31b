"""The hooks for pre-commit: what they run, as pre-commit would run it in a project's own environment."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook for hook in yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text())
}
STEP = """
import pytest, torch

@pytest.mark.expect(forward_kernels={most})
def test_step():
    torch.ones(3) + 1
    torch.ones(3) * 2

def test_other():
    raise AssertionError("it has no limits, and is not run")
"""
TRAIN = """
import torch
net = torch.nn.Linear(8, 8)
for _ in range(2000):
    net(torch.randn(4, 8)).sum().backward()
    net.zero_grad()
"""

pytestmark = pytest.mark.slow


def run(hook: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The hook's entry with its arguments, with this environment's programs first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        [*shlex.split(HOOKS[hook]["entry"]), *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_both_use_the_projects_own_environment_and_no_list_of_files() -> None:
    assert set(HOOKS) == {"flatout-expect", "flatout-step-time"}
    for hook in HOOKS.values():
        assert hook["language"] == "system" and hook["pass_filenames"] is False


@pytest.mark.parametrize(("most", "code"), [pytest.param(4, 0, marks=pytest.mark.long), (3, 1)])
@pytest.mark.long
def test_limits_of_a_step_are_looked_at_and_nothing_else(most: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "test_step.py").write_text(STEP.format(most=most))
    done = run("flatout-expect", tmp_path)
    assert done.returncode == code, done.stdout
    assert ("forward_kernels=3: 4 ran" in done.stdout) == bool(code)


@pytest.mark.long
def test_a_push_reports_what_makes_the_step_slow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = run("flatout-step-time", tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert "a training step" in done.stdout
