from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.rules.overhead.tensor_from_python import RULE


@pytest.mark.parametrize("detail", ["list", "arrays"])
def test_a_tensor_from_a_long_list_is_named(detail: str) -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 20, "x = torch.tensor(rows)")
    run.use("torch.tensor", line, 0.02, detail=detail)
    run.sampled(line, 0.03)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (20, pytest.approx(0.03))


@pytest.mark.parametrize("detail", ["short list", "scalar", "array", "tensor"])
def test_what_is_short_or_copied_as_a_whole_is_left_alone(detail: str) -> None:
    run = EvidenceBuilder()
    run.use("torch.tensor", run.line("train.py", 20), 0.02, detail=detail)
    assert not list(RULE.check(run.build()))
