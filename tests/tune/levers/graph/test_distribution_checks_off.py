from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled
from torch.distributions import Categorical, Distribution, Normal

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.distribution_checks_off import LEVER


def test_it_is_offered_where_checks_were_found() -> None:
    run = EvidenceBuilder().build()
    [refusal] = LEVER.propose(run, ())
    assert isinstance(refusal, Refusal)
    [candidate] = LEVER.propose(run, [found(0.01)])
    assert isinstance(candidate, Candidate)


def test_nothing_is_checked_and_the_same_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile switches it off
    torch.manual_seed(0)
    drawn = Categorical(logits=torch.arange(4.0)).sample((100,))
    with pulled(LEVER) as hooks:
        assert hooks.done == [LEVER.id]
        Normal(0.0, -1.0)  # is refused where arguments are checked
        torch.manual_seed(0)
        assert torch.equal(Categorical(logits=torch.arange(4.0)).sample((100,)), drawn)
        with pytest.raises(ValueError):
            Normal(0.0, -1.0, validate_args=True)
    assert Distribution._validate_args is True
    with pytest.raises(ValueError):
        Normal(0.0, -1.0)


def test_edited_it_is_switched_off_where_the_script_starts() -> None:
    text = "import torch\nfrom torch.distributions import Normal\n\nprint(Normal(0.0, 1.0))\n"
    after = edited(LEVER, text)
    assert "\ntorch.distributions.Distribution.set_default_validate_args(False)\n" in after
    assert after.index("set_default") < after.index("print(")
    with pytest.raises(EditError, match="already"):
        edited(LEVER, after)
