from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.rules.compute.double_forward import RULE


def called_twice(*, graphs_used: int) -> EvidenceBuilder:
    run = EvidenceBuilder(backward=0.04)
    run.model(run.line("train.py", 20, "loss = criterion(net(x), y)"), call_s=0.02)
    second = run.line("train.py", 21, "accuracy = (net(x).argmax(1) == y).float().mean()")
    run.model(second, call_s=0.02, graphs_used=graphs_used)
    run.fact("double-forward", second, value=1.0)
    return run


def test_the_second_call_is_named_with_its_own_time() -> None:
    finding = only_finding(RULE, called_twice(graphs_used=0).build())
    assert finding.where is not None
    assert finding.where.line == 21
    assert [s.line for s in finding.also] == [20]
    assert finding.cost_s == pytest.approx(0.02)


def test_a_second_graph_that_is_used_costs_its_backward_too() -> None:
    assert only_finding(RULE, called_twice(graphs_used=50).build()).cost_s == pytest.approx(0.02 + 0.04 / 2)


def test_two_calls_that_were_not_seen_to_be_equal_are_left_alone() -> None:
    run = called_twice(graphs_used=0)
    run.facts.clear()
    assert not list(RULE.check(run.build()))
