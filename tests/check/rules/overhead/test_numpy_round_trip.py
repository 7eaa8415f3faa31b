from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.numpy_round_trip import RULE


def going(*, back: bool, function: str = "smooth") -> EvidenceBuilder:
    """Line 10 leaves for NumPy, line 11 works there, line 12 comes back if `back`."""
    run = EvidenceBuilder()
    run.use("Tensor.numpy", run.line("model.py", 10, function="smooth"), 0.0001)
    run.sampled(run.line("model.py", 11, function="smooth"), 0.02)
    if back:
        run.use("torch.from_numpy", run.line("model.py", 12, function=function), 0.0001, detail="array")
    return run


def test_the_line_that_works_in_numpy_is_named() -> None:
    finding = only_finding(RULE, going(back=True).build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (11, pytest.approx(0.02))


def test_values_that_only_leave_are_left_alone() -> None:
    assert not list(RULE.check(going(back=False).build()))


def test_a_batch_that_comes_in_elsewhere_is_no_round_trip() -> None:
    assert not list(RULE.check(going(back=True, function="load").build()))
