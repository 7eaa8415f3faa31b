from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.levers.graph.debug_off import LEVER
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Refusal


def test_what_the_rule_found_is_offered_and_else_refused() -> None:
    finding = Finding(
        rule="run.debug-mode",
        regime="overhead",
        where=None,
        cost_s=0.05,
        saved_s=(0.03, 0.05),
        because="anomaly detection is on",
        edit="",
    )
    evidence = EvidenceBuilder().build()
    [candidate] = LEVER.propose(evidence, (finding,))
    assert isinstance(candidate, Candidate) and candidate.saved_s == (0.03, 0.05)
    [refusal] = LEVER.propose(evidence, ())
    assert isinstance(refusal, Refusal)


def test_the_mode_stays_off_until_the_end() -> None:
    with pulled(LEVER) as seams:
        torch.autograd.set_detect_anomaly(True)
        with torch.autograd.detect_anomaly(check_nan=True):
            assert not torch.is_anomaly_enabled()
        with torch.autograd.set_detect_anomaly(True):
            assert not torch.is_anomaly_enabled()
        assert seams.done == [LEVER.id]
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert torch.is_anomaly_enabled()
