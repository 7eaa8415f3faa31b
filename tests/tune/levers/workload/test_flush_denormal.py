from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.workload.flush_denormal import LEVER

TINY = torch.tensor([1e-39])


def test_without_such_numbers_it_says_so() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_tiny_numbers_become_zero_and_afterwards_stay() -> None:
    with pulled(LEVER) as hooks:
        flushed = (TINY * 1.0).item()
    if LEVER.id in hooks.done:  # the processor can
        assert flushed == 0.0
    assert (TINY * 1.0).item() > 0


def test_edited_it_is_switched_on_where_the_script_starts() -> None:
    text = '"""Train."""\nN = 3\nprint(N)\n'
    assert (
        edited(LEVER, text) == '"""Train."""\n\nimport torch\n\nN = 3\n\ntorch.set_flush_denormal(True)\n\nprint(N)\n'
    )
    with pytest.raises(EditError, match="already"):
        edited(LEVER, edited(LEVER, text))
