from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.numpy_round_trip import RULE
from flatout.core.records.usage import RoundTrip


def going() -> EvidenceBuilder:
    """Line 10 leaves for NumPy, line 11 works there, line 12 comes back; line 20 starts the backward."""
    run = EvidenceBuilder()
    file = run.sources[run.line("model.py", 10)].file
    run.round_trips.append(RoundTrip(file=file, away=(10,), back=(12,), spans=((10, 12),)))
    run.sampled(run.line("model.py", 11), 0.02)
    run.sampled(run.line("model.py", 20), 0.04, phase="backward")
    return run


def test_the_line_that_works_in_numpy_is_named_with_the_time_of_these_lines_alone() -> None:
    finding = only_finding(RULE, going().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (11, pytest.approx(0.02))
    assert [s.line for s in finding.also] == [10]


def test_the_lines_own_tensor_operators_are_no_numpy() -> None:
    run = going()
    run.operator("aten.mul", run.line("model.py", 11), op_s=0.015)
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.005)


def test_what_a_loaders_fetch_does_is_the_loaders() -> None:
    run = EvidenceBuilder()
    run.round_trips = going().round_trips
    run.sampled(run.line("model.py", 11), 0.02, phase="data")
    assert not list(RULE.check(run.build()))


def test_values_that_do_not_come_back_are_left_alone() -> None:
    run = going()
    run.round_trips.clear()
    assert not list(RULE.check(run.build()))
