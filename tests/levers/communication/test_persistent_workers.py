from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch.utils.data import DataLoader, TensorDataset

from flatout.levers.communication.persistent_workers import LEVER
from flatout.records.lever import Refusal


def test_a_run_without_workers_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


def test_loaders_with_workers_are_made_with_lasting_ones() -> None:
    data = TensorDataset(torch.arange(8))
    with pulled(LEVER) as seams:
        assert not DataLoader(data, 2).persistent_workers
        assert not seams.done
        assert DataLoader(data, 2, num_workers=1).persistent_workers
        assert seams.done == [LEVER.id]
    assert not DataLoader(data, 2, num_workers=1).persistent_workers
