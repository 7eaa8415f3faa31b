from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.compile_never_pays import RULE
from flatout.core.records.compilation import CompileEvent
from flatout.core.records.trial import TimeModel, TrialResult


def compiled(*, eager_s: float = 0.05, compile_s: float = 10.0) -> EvidenceBuilder:
    """torch.compile on line 8; a call takes 50 ms compiled and `eager_s` eager; 60 steps were seen."""
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20))
    run.compiled(at=(run.line("train.py", 8),), compile_s=compile_s)
    [trial] = proposed(RULE, run.build())
    assert isinstance(trial, TimeModel)
    run.trial(TrialResult(trial=trial, now_s=0.05, cured_s=eager_s))
    return run


def test_a_model_that_is_faster_eager_is_named_where_it_is_compiled() -> None:
    finding = only_finding(RULE, compiled(eager_s=0.03).build())
    assert finding.where is not None
    assert (finding.where.line, finding.saved_s[1]) == (8, pytest.approx(0.02))


def test_a_model_that_is_as_fast_eager_is_left_alone() -> None:
    diagnosis = diagnose(compiled(eager_s=0.049).build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())


def test_a_run_that_ends_before_compiling_has_paid_is_noted_with_the_step() -> None:
    [note] = diagnose(compiled(eager_s=0.06).build(), [RULE]).notes
    assert "step 1000" in note.text


def test_compiling_that_pays_within_the_run_is_left_alone() -> None:
    assert diagnose(compiled(eager_s=0.1, compile_s=2.0).build(), [RULE]).notes == ()


def test_after_a_limit_there_is_nothing_to_compare() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20))
    run.compiled(CompileEvent(kind="limit", source=-1, reason="n == 7", count=1))
    assert not proposed(RULE, run.build())
