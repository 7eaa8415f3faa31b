from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.levers.memory.gradients_to_none import LEVER
from flatout.records.lever import Candidate, Refusal


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

    with pulled(LEVER) as seams:
        for owner in (optimizer, net):
            backward()
            owner.zero_grad(set_to_none=False)
            assert net.weight.grad is None
        assert seams.done == [LEVER.id]
    backward()
    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None
