from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran

from flatout.blocks.training import vectorised_draws
from flatout.blocks.training.vectorised_draws import draws_refusal
from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.parallelism.vectorised_draws import LEVER

TEXT = '"""Train."""\nimport torch\n\nN = 9000\ntorch.manual_seed(0)\nmask = torch.empty(N).bernoulli_(0.3)\n'


def test_without_such_masks_it_says_so() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_masks_are_those_of_before_and_it_is_noted_where_it_can_be() -> None:
    plain = torch.empty(9000).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    with pulled(LEVER) as hooks:
        drawn = torch.empty(9000).bernoulli_(0.3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain, drawn)
    assert (LEVER.id in hooks.done) == (not draws_refusal())


@pytest.mark.skipif(bool(draws_refusal()), reason=draws_refusal())
def test_edited_it_is_switched_on_where_the_script_starts() -> None:
    new = edited(LEVER, TEXT)
    assert "from flatout import vectorise_draws" in new
    plain = ran(TEXT)["mask"]
    try:
        assert torch.equal(ran(new)["mask"], plain)
    finally:
        for registered in vectorised_draws._registered:
            registered._destroy()
        vectorised_draws._registered.clear()  # the script switches it on for its process, which is this one
    with pytest.raises(EditError, match="already"):
        edited(LEVER, new)
