from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.recomputed_constant import RULE


def test_a_constant_is_named_with_what_it_costs() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 15, "mask = torch.full((t, t), -torch.inf).triu(1)", function="forward")
    row = run.operator("aten.triu", line, op_s=0.02)
    run.constant(line, seconds=0.02, operators=(row,))

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.operators) == (15, (row,))
    assert finding.saved_s[0] > 0.5 * 0.02
    assert diagnose(run.build(), [RULE]).findings


def test_constants_of_one_function_are_one_finding_at_the_costliest() -> None:
    run = EvidenceBuilder()
    cheap, dear = run.line("model.py", 14, function="forward"), run.line("model.py", 15, function="forward")
    run.constant(cheap, seconds=0.005)
    run.constant(dear, seconds=0.015)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also]) == (15, [14])
    assert finding.cost_s == pytest.approx(0.02)


def test_constants_of_two_functions_are_two_findings() -> None:
    run = EvidenceBuilder()
    run.constant(run.line("model.py", 14, function="forward"), seconds=0.01)
    run.constant(run.line("model.py", 40, function="rotate"), seconds=0.01)
    assert sorted(f.where.line for f in RULE.check(run.build()) if f.where) == [14, 40]


def test_an_arange_of_microseconds_is_not_reported() -> None:
    run = EvidenceBuilder()
    run.constant(run.line("model.py", 14, "positions = torch.arange(t)"), seconds=5e-6)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_constant_without_a_line_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.constant(-1, seconds=0.02)
    assert not list(RULE.check(run.build()))
