from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.rules.input.environment_steps import RULE


def test_environments_that_take_long_are_noted() -> None:
    run = EvidenceBuilder(environment=0.04, forward=0.03, backward=0.03)

    diagnosis = diagnose(run.build(), [RULE])

    assert "environments take 40% of each step" in diagnosis.notes[0].text
    assert not diagnosis.findings


def test_loops_without_environments_are_left_alone() -> None:
    assert diagnose(EvidenceBuilder().build(), [RULE]).notes == ()
