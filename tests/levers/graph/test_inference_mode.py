from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.levers.graph.inference_mode import LEVER
from flatout.records.lever import Candidate, Refusal


def test_evaluation_that_builds_graphs_in_vain_is_offered() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    run.model(run.line("train.py", 9, "net(v)"), is_training=False, graphs_used=0)
    [candidate] = LEVER.propose(run.build(), [found(0.03)])
    assert isinstance(candidate, Candidate) and candidate.saved_s[1] == 0.03


def test_a_model_that_is_differentiated_in_evaluation_mode_is_refused() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 9, "net(v)"), is_training=False, graphs_used=0)
    run.model(run.line("attack.py", 9, "net(x)"), is_training=False, name="Victim")
    [refusal] = LEVER.propose(run.build(), [found(0.03)])
    assert isinstance(refusal, Refusal) and "Victim" in refusal.because


def test_a_run_without_evaluation_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


def test_calls_in_evaluation_mode_build_no_graph_and_those_in_training_do() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pulled(LEVER) as seams:
        assert net(x).requires_grad
        assert not seams.done
        net.eval()
        assert not net(x).requires_grad
        assert seams.done == [LEVER.id]
    assert net(x).requires_grad
