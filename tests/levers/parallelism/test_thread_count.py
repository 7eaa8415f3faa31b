from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.errors import PlanError
from flatout.levers.parallelism.thread_count import LEVER
from flatout.records.lever import Candidate, Refusal


def test_other_numbers_of_threads_are_offered() -> None:
    found = list(LEVER.propose(EvidenceBuilder().build(), ()))
    assert found
    assert all(isinstance(c, Candidate) and c.parameters["num_threads"] for c in found)


def test_work_on_a_device_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder(device_s=0.05).build(), ())
    assert isinstance(refusal, Refusal)


def test_the_number_is_set_and_stays_until_the_end() -> None:
    before = torch.get_num_threads()
    with pulled(LEVER, num_threads=before + 1) as seams:
        torch.set_num_threads(before + 3)  # the script's own wish
        assert torch.get_num_threads() == before + 1
        assert seams.done == [LEVER.id]
    assert torch.get_num_threads() == before


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="num_threads"), pulled(LEVER, num_threads="many"):
        pass
