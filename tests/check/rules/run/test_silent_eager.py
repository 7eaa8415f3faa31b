from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.silent_eager import RULE
from flatout.core.records.compilation import CompileEvent


def limited(before_s: float | None) -> EvidenceBuilder:
    """The counter of line 14 was recompiled for until the limit; a step took `before_s` before that, 100 ms now."""
    run = EvidenceBuilder()
    line = run.line("model.py", 14, "self.calls += 1")
    run.compiled(
        CompileEvent(kind="limit", source=line, reason="self.calls == 7", count=1, last_step=9), before_limit_s=before_s
    )
    return run


def test_steps_that_are_slower_since_the_limit_are_named() -> None:
    finding = only_finding(RULE, limited(0.06).build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (14, pytest.approx(0.04))


@pytest.mark.parametrize("before_s", [None, 0.1, 0.12])
def test_a_limit_without_a_slower_step_is_a_note(before_s: float | None) -> None:
    diagnosis = diagnose(limited(before_s).build(), [RULE])
    assert diagnosis.findings == ()
    assert "step 9" in diagnosis.notes[0].text


def test_a_call_of_compile_that_compiled_nothing_is_a_note() -> None:
    run = EvidenceBuilder()
    run.compiled(num_frames=0, at=(run.line("train.py", 8),))
    [note] = diagnose(run.build(), [RULE]).notes
    assert "nothing was compiled" in note.text


def test_compiled_code_without_a_limit_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.compiled()
    assert diagnose(run.build(), [RULE]).notes == ()
