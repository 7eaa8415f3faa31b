from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.tensor_from_python import RULE


@pytest.mark.parametrize("detail", ["list", "arrays"])
def test_a_tensor_from_a_long_list_is_named(detail: str) -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 20, "x = torch.tensor(rows)")
    run.use("torch.tensor", line, 0.02, detail=detail)
    run.sampled(line, 0.03)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (20, pytest.approx(0.03))
    assert "takes 20.00 ms; with what builds the list the line takes 30.00 ms" in finding.because


def test_a_line_that_takes_no_more_than_its_calls_is_not_named_twice() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 20, "x = torch.tensor(rows)")
    run.use("torch.tensor", line, 0.02, detail="list")

    assert only_finding(RULE, run.build()).because.endswith("takes 20.00 ms")


@pytest.mark.parametrize("detail", ["short list", "scalar", "array", "tensor"])
def test_what_is_short_or_copied_as_a_whole_is_left_alone(detail: str) -> None:
    run = EvidenceBuilder()
    run.use("torch.tensor", run.line("train.py", 20), 0.02, detail=detail)
    assert not list(RULE.check(run.build()))


def test_lines_of_one_function_are_one_finding() -> None:
    run = EvidenceBuilder()
    for number, seconds in ((20, 0.02), (21, 0.01)):
        run.use("torch.tensor", run.line("train.py", number, function="batch"), seconds, detail="list")
    run.use("torch.tensor", run.line("train.py", 40, function="targets"), 0.005, detail="list")

    first, second = RULE.check(run.build())

    assert first.where is not None and second.where is not None
    assert (first.where.line, [s.line for s in first.also], second.where.line) == (20, [21], 40)
    assert first.cost_s == pytest.approx(0.03)
