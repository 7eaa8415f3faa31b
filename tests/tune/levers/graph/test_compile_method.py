"""Methods that a loop calls instead of their module, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.compile_method import LEVER, edit

SCRIPT = '''import torch
from torch import nn


class Base(nn.Module):
    """What policies share."""


class Policy(Base):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Linear(3, 1)

    def act(self, x, action=None):
        dist = torch.distributions.Normal(self.actor(x), 1.0, validate_args=False)
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action).sum(1), self.critic(x)

    def forward(self, x):
        return self.actor(x)

    @torch.no_grad()
    def value(self, x):
        return self.critic(x)

    @property
    def size(self):
        return self.critic(torch.zeros(3))

    def learn(self, x):
        self.critic(x).sum().backward()

    def rows(self, x):
        yield self.critic(x)


class Trainer:
    def __init__(self):
        self.policy = Policy()

    def act(self, x):
        return self.policy.act(x)
'''


def run_of(
    folder: Path, function: str = "Policy.act", *, sampled_s: float = 0.05, device: str = "cpu"
) -> Candidate | Refusal:
    file = folder / "train.py"
    file.write_text(SCRIPT)
    line = 1 + SCRIPT.splitlines().index(
        "        dist = torch.distributions.Normal(self.actor(x), 1.0, validate_args=False)"
    )
    run = EvidenceBuilder(forward=0.06, backward=0.03)
    source = run.line("train.py", line, "self.actor(x)", function=function)
    run.model(source, calls=20, call_s=0.001)
    run.sampled(source, sampled_s)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(file)), device=device)
    sources = tuple(msgspec.structs.replace(s, file=str(file)) for s in evidence.sources)
    return next(iter(LEVER.propose(msgspec.structs.replace(evidence, workload=workload, sources=sources), ())))


def test_the_method_in_which_models_are_called_is_offered(tmp_path: Path) -> None:
    offered = run_of(tmp_path)
    assert isinstance(offered, Candidate)
    assert offered.parameters["function"] == "Policy.act" and offered.parameters["file"] == "train.py"
    assert offered.saved_s[0] < 0 < offered.saved_s[1] < 0.08


def test_a_device_that_waits_for_a_small_model_surely_gains(tmp_path: Path) -> None:
    offered = run_of(tmp_path, device="NVIDIA H200")
    assert isinstance(offered, Candidate) and offered.saved_s[0] > 0


@pytest.mark.parametrize(
    ("function", "sampled_s", "why"),
    [
        ("main", 0.05, "calls its models as they are"),
        ("Policy.forward", 0.05, "calls its models as they are"),
        ("Trainer.act", 0.05, "no method of a module"),
        ("Policy.learn", 0.05, "backward"),
    ],
)
def test_other_methods_are_refused(tmp_path: Path, function: str, sampled_s: float, why: str) -> None:
    refused = run_of(tmp_path, function, sampled_s=sampled_s)
    assert isinstance(refused, Refusal) and why in refused.because


def test_a_method_of_another_folder_is_refused() -> None:
    run = EvidenceBuilder(forward=0.06, backward=0.03)
    source = run.line("/elsewhere/trainer.py", 3, "self.actor(x)", function="Policy.act")
    run.model(source, calls=20, call_s=0.001)
    run.sampled(source, 0.05)
    [refused] = LEVER.propose(run.build(), ())
    assert isinstance(refused, Refusal) and "cannot be read" in refused.because


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("Trainer.act", "no method of a module"),
        ("Policy.size", "no plain method"),
        ("Policy.learn", "backward"),
        ("Policy.rows", "generator"),
        ("Policy.gone", "no one function"),
    ],
)
def test_an_edit_is_refused(function: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(SCRIPT, {"file": "train.py", "function": function})


@pytest.mark.parametrize(
    "more",
    [
        "policy = torch.compile(Policy())",
        "import re\nWORD = re.compile('a')\npolicy = Policy()\npolicy.compile()",
        "@torch.compile\ndef loss(x):\n    return x",
        "from torch import compile\npolicy = compile(Policy())",
    ],
)
def test_a_file_that_compiles_is_left_alone(more: str) -> None:
    with pytest.raises(EditError, match="compiles something already"):
        edit(f"{SCRIPT}\n{more}\n", {"file": "train.py", "function": "Policy.act"})


def test_a_pattern_is_no_model() -> None:
    edit(f"import re\n{SCRIPT}\nWORD = re.compile('a')\n", {"file": "train.py", "function": "Policy.act"})


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_compiled_method_computes_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = edit(SCRIPT, {"file": "train.py", "function": "Policy.act", "mode": mode})
    option = "" if mode == "default" else f', mode="{mode}"'
    assert f"    @torch.compile(dynamic=False{option})\n    def act(self, x, action=None):" in new
    calls: list[dict[str, Any]] = []

    def compile(function: Any = None, **options: Any) -> Any:
        calls.append(options)
        return torch._dynamo.optimize("eager")

    found = []
    for text in (SCRIPT, new):
        torch.manual_seed(0)
        made: dict[str, Any] = {"__name__": __name__}
        monkeypatch.setattr(torch, "compile", compile)
        exec(text, made)
        monkeypatch.undo()
        policy = made["Policy"]()
        x = torch.randn(5, 3)
        action, log_prob, value = policy.act(x)
        again = policy.act(x, action)[1]
        found.append((action, log_prob, value, again))
    assert calls == [{"dynamic": False} | ({} if mode == "default" else {"mode": mode})]
    assert all(torch.allclose(one, two) for one, two in zip(*found, strict=True))


def test_decorators_stay_outside() -> None:
    new = edit(SCRIPT, {"file": "train.py", "function": "Policy.value"})
    assert "    @torch.no_grad()\n    @torch.compile(dynamic=False)\n    def value(self, x):" in new
