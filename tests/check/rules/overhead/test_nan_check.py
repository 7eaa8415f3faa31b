from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.nan_check import RULE


def checking(*, read_on: int | None) -> EvidenceBuilder:
    """Every gradient is checked on line 30 of train.py; the answer is read on `read_on`."""
    run = EvidenceBuilder()
    line = run.line("train.py", 30, "bad = torch.isnan(p.grad).any()", loops=(29,))
    run.use("torch.isnan", line, 0.004, calls=40)
    run.operator("aten.isnan", line, inputs=[(512, 512)], output=(512, 512), calls=40, op_s=0.01, phase="other")
    if read_on is not None:
        run.host_read(run.line("train.py", read_on, "if bad:"), call="bool", calls=40)
    return run


@pytest.mark.parametrize("read_on", [30, 32])
def test_checks_whose_answer_is_read_are_named(read_on: int) -> None:
    finding = only_finding(RULE, checking(read_on=read_on).build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (30, pytest.approx(0.01))


@pytest.mark.parametrize("read_on", [None, 80])
def test_a_mask_that_nobody_reads_is_left_alone(read_on: int | None) -> None:
    assert not list(RULE.check(checking(read_on=read_on).build()))
