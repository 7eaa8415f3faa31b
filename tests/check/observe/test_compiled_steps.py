"""Scripts that compile their optimizer's step, or the whole update: they run as without us, and their steps are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

_HEAD = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
_STEP = """
@torch.compile(backend="eager")
def step():
    optimizer.step()

for i in range(400):
    loss = model(torch.randn(64, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    step()
    if i % 50 == 0:
        print(loss.item())
"""
_UPDATE = """
@torch.compile(backend="eager")
def update(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

for i in range(400):
    loss = update(torch.randn(64, 64))
    if i % 50 == 0:
        print(loss.item())
"""
_WITH_LOADER = """
@torch.compile(backend="eager")
def update(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

@torch.compile(backend="eager", fullgraph=True)
def drawn(x):
    return torch.rand(x.shape).mul(2).floor() + x

loader = torch.utils.data.DataLoader([torch.randn(64) for _ in range(64 * 400)], batch_size=64)
for i, x in enumerate(loader):
    loss = update(drawn(x))
    if i % 50 == 0:
        print(loss.item(), torch.rand(1).numel())
"""


@pytest.mark.parametrize("loop", [_STEP, _UPDATE, _WITH_LOADER], ids=["step", "update", "loader"])
def test_a_compiled_update_runs_as_without_us_and_its_steps_are_found(loop: str, tmp_path: Path) -> None:
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(_HEAD + loop)
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    command = [sys.executable, "-m", "flatout.app.cli", "check", "--json", str(found), str(script)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[-2000:]
    expected = plain.stdout.splitlines()
    assert checked.stdout.splitlines()[: len(expected)] == expected
    assert "INTERNAL ASSERT" not in checked.stderr
    assert "recompile_limit" not in checked.stderr, "what is tried is not compiled as a part of the script"

    evidence = msgspec.json.decode(found.read_bytes())["evidence"]
    assert evidence["steps"]["kind"] == "training"
    assert evidence["steps"]["num_timed"] > 200
    rules = {finding["rule"] for finding in msgspec.json.decode(found.read_bytes())["findings"]}
    assert "compute.unused-output" not in rules, "the optimizer's step is not without use"
