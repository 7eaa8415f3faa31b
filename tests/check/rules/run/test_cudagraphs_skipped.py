from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.cudagraphs_skipped import RULE
from flatout.core.records.compilation import CompileEvent


def test_a_skipped_graph_is_noted_with_the_reason() -> None:
    run = EvidenceBuilder(device_s=0.05)
    run.compiled(CompileEvent(kind="cudagraph-skip", source=run.line("m.py", 4), reason="mutated inputs", count=2))
    [note] = diagnose(run.build(), [RULE]).notes
    assert "mutated inputs" in note.text


def test_a_run_without_skips_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.compiled(CompileEvent(kind="frame", source=run.line("m.py", 4), reason="forward", count=1))
    assert diagnose(run.build(), [RULE]).notes == ()
