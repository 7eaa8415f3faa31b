"""Methods that a loop calls instead of their module, captured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.capture_method import LEVER, edit

SCRIPT = """import random

import numpy as np
import torch
from torch import nn

LIMIT = 2.0
rate = 1.0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Linear(3, 1)

    def act(self, x, action=None):
        mean = self.actor(x).clamp(-LIMIT, LIMIT)
        if action is None:
            action = torch.distributions.Normal(mean, 1.0).sample()
        return action, self.critic(x)

    def explore(self, x):
        return self.actor(x) if random.random() > 0.1 else self.critic(x)

    def noisy(self, x):
        return self.actor(x) + float(np.random.rand())

    def remembers(self, x):
        self.last = self.actor(x)
        return self.last

    def annealed(self, x):
        return self.actor(x) * rate


class Plain:
    def act(self, x):
        return x


policy = Policy()
for action in range(3):
    rate = rate * 0.9
    policy.act(torch.zeros(1, 3))
"""


def run_of(
    folder: Path, *, device: str = "NVIDIA H200", parameters: int = 20, calls: float = 20
) -> Candidate | Refusal:
    file = folder / "train.py"
    file.write_text(SCRIPT)
    line = 1 + SCRIPT.splitlines().index("        mean = self.actor(x).clamp(-LIMIT, LIMIT)")
    run = EvidenceBuilder(forward=0.06, backward=0.03)
    source = run.line("train.py", line, "self.actor(x)", function="Policy.act")
    run.model(source, calls=calls, call_s=0.001)
    run.sampled(source, 0.05)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(file)), device=device)
    sources = tuple(msgspec.structs.replace(s, file=str(file)) for s in evidence.sources)
    models = tuple(msgspec.structs.replace(model, num_parameters=parameters) for model in evidence.models)
    changed = msgspec.structs.replace(evidence, workload=workload, sources=sources, models=models)
    return next(iter(LEVER.propose(changed, ())))


def test_the_method_of_a_small_model_on_a_device_is_offered_with_what_replays_leave(tmp_path: Path) -> None:
    offered = run_of(tmp_path)
    assert isinstance(offered, Candidate)
    assert offered.parameters["function"] == "Policy.act"
    spent_s = 0.05 + 0.03
    assert offered.saved_s[1] == pytest.approx(spent_s - 20 * 0.25e-3)
    assert 0 < offered.saved_s[0] < offered.saved_s[1]


def test_a_processor_and_a_busy_device_are_refused(tmp_path: Path) -> None:
    on_processor, busy = run_of(tmp_path, device="cpu"), run_of(tmp_path, parameters=10**9)
    assert isinstance(on_processor, Refusal) and "no CUDA device" in on_processor.because
    assert isinstance(busy, Refusal) and "busy" in busy.because


def test_the_edit_decorates_the_method() -> None:
    changed = edit(SCRIPT, {"file": "train.py", "function": "Policy.act"})
    assert "from flatout import captured\n" in changed
    assert "    @captured\n    def act(self, x, action=None):\n" in changed
    with pytest.raises(EditError, match="captured already"):
        edit(changed, {"file": "train.py", "function": "Policy.act"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Policy.explore", "calls random.random"),
        ("Policy.noisy", "calls numpy.random.rand"),
        ("Policy.remembers", "changes self.last"),
        ("Policy.annealed", "'rate', a global variable that changes"),
        ("Plain.act", "no method of a module"),
    ],
)
def test_what_no_graph_holds_is_refused(name: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(SCRIPT, {"file": "train.py", "function": name})
