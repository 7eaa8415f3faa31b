from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.workload.freeze import LEVER


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
    with pulled(LEVER, modules=("Net.body.0",)) as hooks:
        net(x).sum().backward()
        assert net.body[0].weight.grad is None
        assert hooks.done == [LEVER.id]
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


TRAIN = """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.body(x))


    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(TRAINED, lr=0.1)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def trained(what: str) -> str:
    return TRAIN.replace("TRAINED", what)


def test_edited_the_body_is_frozen_as_a_whole_and_the_head_the_same() -> None:
    text = trained("net.head.parameters()")
    after = edited(LEVER, text, modules=("Net.body.0", "Net.body.2"))
    assert "net = Net()\nnet.body.requires_grad_(False)\noptimizer" in after
    one, two = ran(text)["net"], ran(after)["net"]
    assert two.body[0].weight.grad is None and one.body[0].weight.grad is not None
    assert torch.equal(one.head.weight, two.head.weight)


def test_edited_a_part_beside_what_is_trained_is_frozen_alone() -> None:
    after = edited(LEVER, trained("[*net.head.parameters(), *net.body[2].parameters()]"), modules=("Net.body.0",))
    assert "net.body[0].requires_grad_(False)\n" in after
    assert ran(after)["net"].body[2].weight.grad is not None


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("net.parameters()", "passed to the optimizer"),
        ("weights", "cannot be read"),
        ("wrapped.head.parameters()", "'wrapped.head'"),
        ("[p for p in net.parameters() if p.requires_grad]", "sets requires_grad itself"),
    ],
)
def test_what_may_be_trained_is_not_frozen(what: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(LEVER, trained(what), modules=("Net.body.0",))


def test_a_model_that_is_not_made_in_the_file_once_is_not_frozen() -> None:
    with pytest.raises(EditError, match="2 places"):
        edited(LEVER, trained("net.head.parameters()") + "    other = Net()\n", modules=("Net.body.0",))
    with pytest.raises(EditError, match="'Other'"):
        edited(LEVER, trained("net.head.parameters()"), modules=("Other.body.0",))
