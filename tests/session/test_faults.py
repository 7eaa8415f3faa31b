"""`flatout tune` among levers that fail in every way: each costs itself alone, and is listed with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.records.plan import from_toml

SCRIPT = """
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, y = torch.randn(64, 32), torch.randn(64, 1)
    for step in range(20000):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

LEVERS = """
    import os, signal, time
    from flatout.records.lever import Candidate, Lever

    def failing(id, harm):
        def propose(evidence, findings):
            saved_s = 0.9 * evidence.steps.whole_s
            yield Candidate(lever=id, saved_s=(saved_s, saved_s), because="it looks good")

        def apply(seams, parameters):
            calls = []

            def change(module, given):
                calls.append(1)
                if len(calls) > 3:
                    harm(module)
                return given

            seams.on_inputs(change)

        return Lever(id=id, title=id, guarantee="bounded", module=__name__, propose=propose, apply=apply)

    kept = []

    def leak(module):
        kept.append(bytearray(b"x" * (8 << 20)))

    def spoil(module):
        weight = next(module.parameters())
        if weight.grad is not None:
            weight.data.mul_(1.01)

    SEGFAULT = failing("fault.segfault", lambda module: os.kill(os.getpid(), signal.SIGSEGV))
    HANG = failing("fault.hang", lambda module: time.sleep(1000))
    WRONG = failing("fault.wrong", spoil)
    LEAK = failing("fault.leak", leak)
    GREEDY = failing("fault.greedy", lambda module: kept.append(bytearray(os.urandom(1 << 20) * (40 << 10))))
"""

ENTRY_POINTS = """
    [flatout.levers]
    segfault = faulty_levers:SEGFAULT
    hang = faulty_levers:HANG
    wrong = faulty_levers:WRONG
    leak = faulty_levers:LEAK
    greedy = faulty_levers:GREEDY
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    info = site / "faulty_levers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-levers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    (site / "faulty_levers.py").write_text(textwrap.dedent(LEVERS))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_failure_costs_itself_alone_and_is_told(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flatout", "tune", "train.py", "--budget", "300s", "--timeout", "12"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "site")},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    lines = " ".join(ended.stdout.split())
    for fault, why in {
        "fault.segfault": "killed by signal 11 (SIGSEGV)",
        "fault.hang": "did not answer within 12 s",
        "fault.wrong": "different in step",
        "fault.leak": "memory grows by",
        "fault.greedy": "MemoryError",
    }.items():
        after = lines.split(fault, 1)[1][:400]
        assert why in after, (fault, after)
    plan = from_toml((folder / "plan.toml").read_bytes())
    assert "graph.debug-off" in [p.id for p in plan.lever]
    assert not any(p.id.startswith("fault.") for p in plan.lever)
    assert not _left_behind(folder)


def _left_behind(folder: Path) -> list[str]:
    """Commands of processes that still work in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.resolve() == folder.resolve():
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found
