from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.levers.workload.flush_denormal import LEVER
from flatout.records.lever import Refusal

TINY = torch.tensor([1e-39])


def test_without_such_numbers_it_says_so() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_tiny_numbers_become_zero_and_afterwards_stay() -> None:
    with pulled(LEVER) as seams:
        flushed = (TINY * 1.0).item()
    if LEVER.id in seams.done:  # the processor can
        assert flushed == 0.0
    assert (TINY * 1.0).item() > 0
