from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.graph_break import RULE
from flatout.core.records.compilation import CompileEvent
from flatout.core.records.trial import TimeGraphBreak, TrialResult


def breaking(*, step_s: float) -> EvidenceBuilder:
    """Lines 20 and 24 of model.py break the graph."""
    run = EvidenceBuilder(step_s=step_s, noise_s=0.01 * step_s)
    run.model(call_s=0.3 * step_s)
    run.compiled(
        *(
            CompileEvent(kind="graph-break", source=run.line("model.py", n), reason="a branch", count=1)
            for n in (20, 24)
        )
    )
    return run


def tried(run: EvidenceBuilder, each_s: float) -> EvidenceBuilder:
    run.trial(TrialResult(trial=TimeGraphBreak(backward=True), now_s=2e-4 + each_s, cured_s=2e-4))
    return run


def test_breaks_of_a_short_step_are_priced_by_the_trial() -> None:
    run = breaking(step_s=0.001)
    assert proposed(RULE, run.build()) == [TimeGraphBreak(backward=True)]

    finding = only_finding(RULE, tried(run, 1e-4).build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (20, pytest.approx(2e-4))


def test_steps_that_replay_what_was_compiled_break_nothing() -> None:
    run = EvidenceBuilder(step_s=0.001, noise_s=0.00001)
    run.compiled(CompileEvent(kind="graph-break", source=run.line("model.py", 20), reason="a branch", count=1))
    line = run.line("train.py", 30, "x = table[rows]")
    run.operator("aten.index", line, op_s=1e-5)
    assert not list(RULE.check(tried(run, 1e-4).build()))
    run.operator("inductor.graph", line, op_s=1e-5)
    assert only_finding(RULE, run.build()).cost_s > 0


def test_breaks_of_a_long_step_are_notes() -> None:
    diagnosis = diagnose(tried(breaking(step_s=0.1), 1e-4).build(), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [20, 24]


def test_a_whole_graph_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.compiled()
    assert not proposed(RULE, run.build())
    assert diagnose(run.build(), [RULE]).notes == ()
