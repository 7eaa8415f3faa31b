"""Without NumPy and libcst, as in an environment with torch and flatout alone: scripts are checked and changes proved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import QUICK

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.tensor([float((index * k) % 97) for k in range(32)]), index % 10

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(60):
    for inputs, targets in DataLoader(Rows(), batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("numpy", "libcst"):
        package = tmp_path / "absent" / name
        package.mkdir(parents=True)
        error = f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
        (package / "__init__.py").write_text(error)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def typed(folder: Path, home: Path, *words: str) -> str:
    environment = {**os.environ, **QUICK, "PYTHONPATH": str(folder / "absent"), "XDG_CACHE_HOME": str(home)}
    environment |= {"PYTHONWARNINGS": "ignore", "COLUMNS": "200"}
    command = [sys.executable, "-m", "flatout.app.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_script_is_checked(folder: Path, cache_home: Path) -> None:
    report = typed(folder, cache_home, "check", "--no-trials", "--seconds", "2", "train.py")
    assert "observing stopped early" not in report
    assert "train.py:" in report and "The floor, line by line" in report


@pytest.mark.slow
@pytest.mark.long
def test_a_change_is_proved(folder: Path, cache_home: Path) -> None:
    (folder / "fused.py").write_text(SCRIPT.replace("lr=1e-3", "lr=1e-3, fused=True"))
    assert "PROVED: equal" in typed(folder, cache_home, "verify", "--no-speed", "--steps", "2", "train.py", "fused.py")
