from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.recompile import RULE
from flatout.core.records.compilation import CompileEvent


def compiling(*, last_step: int = 55, in_steps: int = 20, phase_s: float = 0.08) -> EvidenceBuilder:
    """The model of line 12 is compiled 25 times, the last time in step `last_step` of 60."""
    run = EvidenceBuilder(**({"compile": phase_s} if phase_s else {}))
    line = run.line("model.py", 12, "def forward(self, x):")
    run.compiled(
        CompileEvent(
            kind="recompile",
            source=line,
            reason="size mismatch",
            count=25,
            seconds=4.0,
            in_steps=in_steps,
            last_step=last_step,
        )
    )
    return run


def test_recompiling_that_goes_on_is_named_with_its_seconds_per_step() -> None:
    finding = only_finding(RULE, compiling().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (12, pytest.approx(0.08))


def test_recompiling_that_ended_is_a_note() -> None:
    diagnosis = diagnose(compiling(last_step=12, phase_s=0.0).build(), [RULE])
    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1


def test_two_versions_at_the_start_are_left_alone() -> None:
    diagnosis = diagnose(compiling(last_step=2, in_steps=0, phase_s=0.0).build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())


def test_a_script_without_compile_is_left_alone() -> None:
    assert diagnose(EvidenceBuilder().build(), [RULE]).notes == ()
