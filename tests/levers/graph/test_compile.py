from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import nn

from flatout.levers.graph.compile import LEVER
from flatout.records.lever import Candidate, Refusal


def test_a_model_that_is_most_of_the_step_is_offered() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert 0 < candidate.saved_s[1] <= run.build().steps.step_s


def test_a_model_that_is_little_of_the_step_is_refused() -> None:
    run = EvidenceBuilder(forward=0.001, backward=0.001, data=0.098)
    run.model(run.line("train.py", 5, "net(x)"))
    [refusal] = LEVER.propose(run.build(), ())
    assert isinstance(refusal, Refusal)
    assert "%" in refusal.because


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_a_module_is_compiled_in_place_at_its_first_call_and_afterwards_not() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(3, 4)
    expected = net(x)
    with pulled(LEVER, backend="eager") as seams:
        assert net._compiled_call_impl is None
        output = net(x)
        assert net._compiled_call_impl is not None
        assert seams.done == [LEVER.id]
    assert net._compiled_call_impl is None
    assert torch.equal(output, expected)
