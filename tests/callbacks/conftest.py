from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from tests.command_line import QUICK

_COMMON: Final = """
import hashlib, json, os, random, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, num_steps=40, raise_at=-1):
        self.num_rows, self.raise_at = 8 * num_steps, raise_at
    def __len__(self):
        return self.num_rows
    def __getitem__(self, i):
        if i == self.raise_at:
            raise ValueError(f"row {i} is damaged")
        total = 0.0
        for k in range(30000):  # slow item
            total += (i * k) % 7  # slow item
        return {"x": torch.randn(16) + total * 1e-6, "labels": torch.tensor([i % 3 - 1.0])}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}

def seed():
    random.seed(0); numpy.random.seed(0); torch.manual_seed(0)

def state(net):
    # The weights' bits, and the next number of each generator.
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return [hashlib.sha256(bits).hexdigest(), torch.rand(1).item(), random.random(), numpy.random.rand()]

def facts(checked):
    steps = checked.evidence.steps
    sampled = sorted(checked.evidence.lines, key=lambda line: -line.seconds)
    return {"kind": steps.kind, "num": steps.num_observed, "phases": sorted(steps.phases), "exit": checked.evidence.exit,
            "texts": [[f.rule, f.text] for f in checked.diagnosis.findings], "num_operators": len(checked.evidence.operators),
            "trials_s": checked.evidence.observing.trials_s,
            "heaviest": [checked.evidence.source_of(line.source).text for line in sampled if line.source >= 0][:1],
            "is_noisy": steps.high_s - steps.low_s > 0.3 * steps.step_s}

def tell(**values):
    print("\\n" + json.dumps(values), flush=True)
"""


class Ran(NamedTuple):
    """What a script printed, its exit code, and the objects that it printed as JSON, as one."""

    code: int
    out: str
    err: str
    values: dict[str, Any]


RunScript = Callable[..., Ran]


def assert_slow_item_is_named(facts: dict[str, Any]) -> None:
    """The line that took most is the slow one, and a finding names its function unless the machine was so noisy that none can.

    It names the line itself where enough samples fell into the few steps; else the function's line with operators.
    """
    [heaviest] = facts["heaviest"]
    assert "# slow item" in heaviest
    if not facts["is_noisy"]:
        found = [text for rule, text in facts["texts"] if rule.startswith("input.")]
        assert any("# slow item" in text or text.startswith('return {"x"') for text in found), facts["texts"]


def write_script(folder: Path, *parts: str) -> None:
    """Write `train.py`: these parts, after what all scripts begin with."""
    (folder / "train.py").write_text(_COMMON + "".join(map(textwrap.dedent, parts)))


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    """Runs a script of a user's in `tmp_path` under Python alone, after what all of them begin with."""

    def run(*parts: str) -> Ran:
        write_script(tmp_path, *parts)
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            env={**os.environ, **QUICK, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )
        values: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            if line.startswith('{"'):  # transformers prints its own log as Python has it
                values |= json.loads(line)
        return Ran(done.returncode, done.stdout, done.stderr, values)

    return run
