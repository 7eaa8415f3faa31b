from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.serial_draws import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TrialResult


def masks(*, num: int = 100_000, device: str = "cpu", cured_s: float = 0.0002) -> Evidence:
    """Two layers' dropout, on lines 5 and 9."""
    run = EvidenceBuilder(device_s=0.05 if device == "cuda" else None)
    for line, seconds in ((5, 0.001), (9, 0.003)):
        at = run.line("train.py", line, "x = F.dropout(x)")
        run.operator("aten.bernoulli_", at, inputs=[(num,)], output=(num,), op_s=seconds)
    assert RULE.propose is not None
    run.trials.extend(TrialResult(trial=t, now_s=0.002, cured_s=cured_s) for t in RULE.propose(run.build()))
    return run.build()


def test_all_masks_are_one_finding_at_the_line_that_draws_longest() -> None:
    finding = only_finding(RULE, masks())
    assert finding.where is not None
    assert finding.where.line == 9
    assert [line.line for line in finding.also] == [5]
    assert finding.cost_s == pytest.approx(0.004)
    assert finding.saved_s[1] == pytest.approx(0.0036)


@pytest.mark.parametrize(
    "evidence", [masks(num=500), masks(device="cuda"), masks(cured_s=0.0019)], ids=["small", "device", "fast already"]
)
def test_small_masks_a_device_and_draws_that_are_fast_already_are_no_finding(evidence: Evidence) -> None:
    assert not list(RULE.check(evidence))
