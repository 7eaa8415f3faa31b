from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran

from flatout.core.errors import EditError
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.debug_off import LEVER


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
    with pulled(LEVER) as hooks:
        torch.autograd.set_detect_anomaly(True)
        with torch.autograd.detect_anomaly(check_nan=True):
            assert not torch.is_anomaly_enabled()
        with torch.autograd.set_detect_anomaly(True):
            assert not torch.is_anomaly_enabled()
        assert hooks.done == [LEVER.id]
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert torch.is_anomaly_enabled()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "torch.autograd.set_detect_anomaly(True)\nstate = torch.is_anomaly_enabled()\n",
        "with torch.autograd.detect_anomaly(check_nan=False):\n    x = 1\n    state = torch.is_anomaly_enabled()\n",
        "with torch.autograd.set_detect_anomaly(True), torch.no_grad():\n    state = torch.is_anomaly_enabled()\n",
        "with torch.autograd.detect_anomaly():\n    torch.autograd.set_detect_anomaly(mode=True)\n"
        "    state = torch.is_anomaly_enabled()\n",
        "from torch.autograd import detect_anomaly\nwith detect_anomaly():\n    state = torch.is_anomaly_enabled()\n",
    ],
)
def test_edited_the_mode_is_never_on(text: str) -> None:
    after = edited(LEVER, f"import torch\n{text}")
    assert "anomaly" not in after.replace("is_anomaly_enabled", "")
    assert ran(after)["state"] is False


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("torch.autograd.set_detect_anomaly(args.debug)\n", "on or off"),
        ("if x:\n    torch.autograd.set_detect_anomaly(True)\n", "all that a block"),
        ("mode = torch.autograd.detect_anomaly()\n", "another statement"),
        ("torch.autograd.set_detect_anomaly(False)\n", "no debug mode"),
    ],
)
def test_a_mode_that_may_be_off_is_not_edited(text: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(LEVER, f"import torch\n{text}")


@pytest.mark.slow
def test_edited_the_rest_stays_as_it_was_written() -> None:
    text = "import torch\n\n# anomalies\nwith torch.autograd.detect_anomaly():\n    x = 1  # one\n\n    y = 2\n"
    assert edited(LEVER, text + "torch.zeros(1)\n") == (
        "import torch\n\n# anomalies\nx = 1  # one\n\ny = 2\ntorch.zeros(1)\n"
    )
