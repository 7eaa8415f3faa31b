"""Functions of tensors, and methods of environments on a device, captured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.capture_function import LEVER, edit

SCRIPT = """import random

import torch
from torch import nn

rate = 1.0


class Policy(nn.Module):
    def act(self, x):
        return x


class Balls:
    def __init__(self):
        self.height = torch.ones(4)

    def step(self, push):
        self.height = self.height + push
        return self.height

    def average(self):
        return self.height.mean().item()

    @property
    def low(self):
        return self.height.min()


def discounted(rewards, last):
    found, following = torch.zeros_like(rewards), last
    for t in reversed(range(len(rewards))):
        following = rewards[t] + 0.9 * following
        found[t] = following
    return found


def lucky(x):
    return x * random.random()


def annealed(x):
    return x * rate


def nothing():
    return torch.zeros(3)


def main():
    def inner(x):
        return x + 1

    global rate
    policy, balls = Policy(), Balls()
    for _ in range(3):
        rate = rate * 0.9
        rewards = torch.stack([balls.step(torch.ones(4)) for _ in range(5)])
        loss = policy.act(inner(discounted(rewards, torch.zeros(4)))).sum()
        loss.backward()


main()
"""
LINES = {
    "Balls.step": "        self.height = self.height + push",
    "discounted": "        following = rewards[t] + 0.9 * following",
    "main": "        loss = policy.act(inner(discounted(rewards, torch.zeros(4)))).sum()",
}


def proposals(
    folder: Path, spent_s: dict[str, float], *, device: str = "NVIDIA H200", device_s: float = 0.01
) -> list[Candidate | Refusal]:
    file = folder / "train.py"
    file.write_text(SCRIPT)
    run = EvidenceBuilder(forward=0.06, backward=0.03)
    for function, seconds in spent_s.items():
        number = 1 + SCRIPT.splitlines().index(LINES[function])
        line = run.line("train.py", number, LINES[function].strip(), function=function)
        run.operator("aten.add", line, inputs=[(4,), (4,)], output=(4,), op_s=1e-6, python_s=seconds)
    evidence = run.build()
    return list(
        LEVER.propose(
            msgspec.structs.replace(
                evidence,
                workload=msgspec.structs.replace(evidence.workload, command=("python", str(file)), device=device),
                sources=tuple(msgspec.structs.replace(s, file=str(file)) for s in evidence.sources),
                steps=msgspec.structs.replace(evidence.steps, device_s=None if device == "cpu" else device_s),
            ),
            (),
        )
    )


def test_each_function_whose_operators_the_device_waits_for_is_proposed(tmp_path: Path) -> None:
    found = proposals(tmp_path, {"main": 0.05, "Balls.step": 0.02, "discounted": 0.01})
    assert [c.parameters["function"] for c in found if isinstance(c, Candidate)] == ["Balls.step", "discounted"]
    for candidate, seconds in zip(found, (0.02, 0.01), strict=True):
        assert isinstance(candidate, Candidate)
        assert 0 < candidate.saved_s[0] < candidate.saved_s[1] < seconds


def test_a_function_that_is_a_small_part_now_may_be_a_large_one_later(tmp_path: Path) -> None:
    [found] = proposals(tmp_path, {"Balls.step": 0.001})
    assert isinstance(found, Candidate) and found.saved_s[1] < 0.001


def test_processors_busy_devices_and_small_parts_are_refused(tmp_path: Path) -> None:
    on_processor, busy, small = (
        proposals(tmp_path, {"Balls.step": 0.02}, device="cpu"),
        proposals(tmp_path, {"Balls.step": 0.02}, device_s=0.099),
        proposals(tmp_path, {"Balls.step": 0.0002}),
    )
    for found, why in ((on_processor, "no CUDA device"), (busy, "busy"), (small, "no function of tensors takes")):
        [refusal] = found
        assert isinstance(refusal, Refusal) and why in refusal.because


@pytest.mark.parametrize("name", ["Balls.step", "discounted"])
def test_the_edit_decorates_the_function(name: str) -> None:
    changed = edit(SCRIPT, {"file": "train.py", "function": name})
    indent = "    " * name.count(".")
    assert "from flatout import captured\n" in changed
    assert f"{indent}@captured\n{indent}def {name.rpartition('.')[2]}(" in changed
    with pytest.raises(EditError, match="captured already"):
        edit(changed, {"file": "train.py", "function": name})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Policy.act", "method of a module"),
        ("Balls.__init__", "called by Python itself"),
        ("Balls.average", r"calls \.item\(\)"),
        ("Balls.low", "no plain method"),
        ("lucky", "calls random.random"),
        ("annealed", "'rate', a global variable that changes"),
        ("nothing", "takes no tensors"),
        ("main.inner", "inside of another function"),
        ("main", "takes no tensors|calls"),
    ],
)
def test_what_no_graph_holds_is_refused(name: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(SCRIPT, {"file": "train.py", "function": name})
