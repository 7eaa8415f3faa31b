from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flatout.app.fleet.installing import STARTUP
from flatout.blocks.recording.job_store.opening import open_store
from flatout.core.records.job import JobRecord

TRAIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
    loss = net(torch.randn(64, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item(), "next", torch.rand(1).item())
"""
"""A training whose last line shows its weights and its random numbers."""


class WatchedRun(NamedTuple):
    """How a watched process ended, what it printed, and what it left in the store."""

    code: int
    out: str
    err: str
    jobs: tuple[JobRecord, ...]


Watched = Callable[..., WatchedRun]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    """Runs a script under the start-up hook: `watched(text, *arguments, policy=..., command=..., environment=...)`."""

    def run(
        text: str = TRAIN,
        *arguments: str,
        policy: str = "",
        command: tuple[str, ...] = (sys.executable,),
        environment: dict[str, str] | None = None,
        store: str = "fleet",
    ) -> WatchedRun:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        (tmp_path / "fleet").mkdir(exist_ok=True)
        (tmp_path / "fleet" / "fleet.toml").write_text(policy)
        done = subprocess.run(
            [*command, "train.py", *arguments],
            cwd=tmp_path,
            env=hooked(tmp_path / store) | (environment or {}),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return WatchedRun(done.returncode, done.stdout, done.stderr, open_store(tmp_path / store).read().jobs)

    return run


def hooked(store: Path) -> dict[str, str]:
    """The variables of a watched process, which is no rank and no task of whatever runs the tests."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FLATOUT", "TORCHELASTIC"))}
    return own | {
        "FLATOUT_WATCH": "1",
        "FLATOUT_STORE": str(store),
        "PYTHONPATH": str(STARTUP),
        "OMP_NUM_THREADS": "1",
    }
