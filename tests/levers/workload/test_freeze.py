from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import nn

from flatout.levers.workload.freeze import LEVER
from flatout.records.lever import Candidate, Refusal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def test_modules_whose_gradients_nobody_reads_are_offered_and_else_refused() -> None:
    run = EvidenceBuilder()
    row = run.operator("aten.mm", run.line("net.py", 3), phase="backward", module="Net.body.0")
    run.unused_gradient(run.line("net.py", 3), operators=(row,), seconds=0.01)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters["modules"]
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_the_named_modules_get_no_gradients_and_the_others_the_same() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 4)
    net(x).sum().backward()
    expected = net.head.weight.grad
    net.zero_grad()
    with pulled(LEVER, modules=("Net.body.0",)) as seams:
        net(x).sum().backward()
        assert net.body[0].weight.grad is None
        assert seams.done == [LEVER.id]
    assert expected is not None and net.head.weight.grad is not None
    assert torch.equal(net.head.weight.grad, expected)
    assert all(p.requires_grad for p in net.parameters())


def test_of_two_models_of_one_class_the_second_can_be_meant() -> None:
    student, teacher, x = Net(), Net(), torch.randn(2, 4)
    with pulled(LEVER, modules=("Net (2)", "Net (2).head")):
        student(x)
        teacher(x)
        assert [p.requires_grad for p in teacher.head.parameters()] == [False, False]
        assert all(p.requires_grad for p in student.parameters())
