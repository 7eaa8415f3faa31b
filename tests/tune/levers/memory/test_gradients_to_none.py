from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.gradients_to_none import LEVER


def test_what_the_rule_found_is_offered_and_else_refused() -> None:
    evidence = EvidenceBuilder().build()
    [candidate] = LEVER.propose(evidence, [found(0.02)])
    assert isinstance(candidate, Candidate)
    [refusal] = LEVER.propose(evidence, [])
    assert isinstance(refusal, Refusal)


def test_gradients_are_let_go_by_optimizers_and_modules_and_afterwards_filled() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def backward() -> None:
        net(torch.ones(1, 3)).sum().backward()

    with pulled(LEVER) as hooks:
        for owner in (optimizer, net):
            backward()
            owner.zero_grad(set_to_none=False)
            assert net.weight.grad is None
        assert hooks.done == [LEVER.id]
    backward()
    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None


TRAIN = """
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(HOW)
"""


@pytest.mark.parametrize("how", ["set_to_none=False", "False"])
def test_edited_the_gradients_are_let_go_and_the_weights_the_same(how: str) -> None:
    text = TRAIN.replace("HOW", how)
    before, after = ran(text), ran(edited(LEVER, text))
    assert "optimizer.zero_grad()\n" in edited(LEVER, text)
    assert before["net"].weight.grad is not None and after["net"].weight.grad is None
    assert torch.equal(before["net"].weight, after["net"].weight)


@pytest.mark.parametrize(
    ("how", "why"), [("", "says set_to_none"), ("set_to_none=args.fast", "decides"), ("**how", "may")]
)
def test_what_is_not_certainly_filled_is_not_edited(how: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(LEVER, TRAIN.replace("HOW", how))
