from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.memory import Memory, MemoryKind, MemoryPart
from flatout.tune.levers.memory.recompute import LEVER, edit

MIB = 1 << 20


def run(*, num_blocks: int = 4, kind: MemoryKind = "activations") -> Evidence:
    builder = EvidenceBuilder()
    line = builder.line("model.py", 9, "x = self.body(x)")
    for i in range(num_blocks):
        builder.operator("aten.addmm", line, module=f"Net.blocks.{i}.body", op_s=0.005)
    parts = tuple(
        MemoryPart(kind=kind, bytes=50 * MIB, num_tensors=1, module=f"Net.blocks.{i}.body") for i in range(num_blocks)
    )
    memory = Memory(device="cpu", peak_bytes=300 * MIB, peak_phase="backward", at_peak=parts)
    return msgspec.structs.replace(builder.build(), memory=(memory,))


def test_blocks_that_hold_activations_are_offered_with_what_they_cost() -> None:
    said = list(LEVER.propose(run(), ()))
    assert [c.parameters for c in said if isinstance(c, Candidate)] == [
        {"container": "blocks", "fraction": 1.0},
        {"container": "blocks", "fraction": 0.5},
    ]
    for candidate in said:
        assert isinstance(candidate, Candidate)
        assert candidate.saved_s[0] < candidate.saved_s[1] < 0
        assert 0 < candidate.saved_bytes <= 150 * MIB


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (EvidenceBuilder().build(), "no training"),
        (run(num_blocks=1), "no repeated"),
        (run(kind="parameters"), "no repeated"),
    ],
)
def test_without_such_blocks_it_says_why(evidence: Evidence, why: str) -> None:
    [refusal] = LEVER.propose(evidence, ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(3)))


def test_gradients_stay_and_afterwards_all_is_as_before() -> None:
    inputs = torch.rand(4, 8)
    expected, model = net(), net()
    torch.manual_seed(1)
    expected(inputs).sum().backward()
    with pulled(LEVER, fraction=1.0) as hooks:
        torch.manual_seed(1)
        model(inputs).sum().backward()
        assert hooks.done == [LEVER.id]
        assert all("forward" in vars(block) for block in model)
    assert not any("forward" in vars(block) for block in model)
    for one, two in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def test_models_without_blocks_are_left_alone() -> None:
    with pulled(LEVER) as hooks:
        nn.Linear(2, 2)(torch.rand(1, 2))
        assert not hooks.done
    with pytest.raises(PlanError, match="fraction"), pulled(LEVER, fraction="all"):
        pass


SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.{kind}(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x, scale=2.0):
{body}


torch.manual_seed(0)
net = Net()
net(torch.rand(2, 4)).sum().backward()
grads = [p.grad for p in net.parameters()]
"""
LOOP = "        for block in self.blocks:\n            x = block(x)\n            x = x * scale\n        return x"
WHOLE = "        x = self.blocks(x)\n        return x"


def script(body: str, kind: str = "ModuleList") -> str:
    text = SCRIPT.format(body=body, kind=kind)
    if kind == "ModuleList":
        return text
    return text.replace("Sequential(nn.Sequential(", "Sequential(*(nn.Sequential(").replace("range(3))", "range(3)))")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (LOOP, "ModuleList"),
        (WHOLE, "Sequential"),
        ("        x = torch.tanh(self.blocks(x))\n        return x", "Sequential"),
        ("        x = self.blocks(torch.sin(x))\n        return x", "Sequential"),
        ("        h = self.blocks(x).exp()\n        return h", "Sequential"),
        ("        return self.blocks(x).exp()", "Sequential"),
    ],
)
def test_the_forward_is_edited(body: str, kind: str) -> None:
    text = script(body, kind)
    changed = edit(text, {"container": "blocks"})
    assert "x = checkpoint(block, x, use_reentrant=False)" in changed
    assert "from torch.utils.checkpoint import checkpoint" in changed
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    exec(text, before)
    exec(changed, after)
    assert all(map(torch.equal, after["grads"], before["grads"]))


@pytest.mark.parametrize(
    "body",
    [
        "        for i, block in enumerate(self.blocks):\n            x = block(x)",
        "        for block in self.blocks:\n            x = block(block(x))",
        "        for block in self.layers:\n            x = block(x)",
        "        h = self.blocks(x)\n        return x + h",
        "        x = x + self.blocks(x)",
        "        x = self.blocks(x) if scale else x",
        "        x = self.blocks(x + scale)",
    ],
)
def test_other_forwards_are_left(body: str) -> None:
    with pytest.raises(EditError, match="no places"):
        edit(script(body), {"container": "blocks"})


def test_batch_norm_is_left() -> None:
    with pytest.raises(EditError, match="twice"):
        edit(script(LOOP).replace("nn.Tanh()", "nn.BatchNorm1d(4)"), {"container": "blocks"})


def test_a_part_of_the_blocks_is_no_edit() -> None:
    with pytest.raises(EditError, match="part"):
        edit(script(LOOP), {"container": "blocks", "fraction": 0.5})
