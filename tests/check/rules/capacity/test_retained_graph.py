from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import MIB, part, remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.retained_graph import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import RetainedGraph


def retained(num_bytes: int, *, kept_bytes: int) -> Evidence:
    run = EvidenceBuilder()
    line = run.line("train.py", 30, "loss.backward(retain_graph=True)")
    graph = RetainedGraph(source=line, bytes=num_bytes, num_calls=1)
    return remembering(run, retained=(graph,), parts=(part("kept", kept_bytes),))


def test_the_bytes_saved_are_those_still_held_at_the_peak() -> None:
    finding = only_finding(RULE, retained(400 * MIB, kept_bytes=300 * MIB))

    assert finding.saved_bytes == 300 * MIB
    assert finding.where is not None
    assert finding.where.line == 30


def test_a_graph_that_is_not_there_at_the_peak_is_a_note() -> None:
    diagnosis = diagnose(retained(400 * MIB, kept_bytes=0), [RULE])

    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1
