from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import MIB, part, remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.full_logits import RULE
from flatout.core.records.evidence import Evidence

TOKENS = 4096


def headed(vocabulary: int) -> Evidence:
    run = EvidenceBuilder()
    line = run.line("model.py", 70, "loss = F.cross_entropy(logits, targets)")
    shape = (TOKENS, vocabulary)
    run.operator("aten._log_softmax", line, inputs=[shape], output=shape)
    num_bytes = 4 * TOKENS * vocabulary
    logits = part("activations", num_bytes, source=line, example=f"float32[8, {TOKENS // 8}, {vocabulary}]")
    gradient = part("temporaries", num_bytes, source=line, example=f"float32[{TOKENS}, {vocabulary}]")
    return remembering(run, parts=(logits, gradient, part("parameters", 100 * MIB)))


def test_logits_over_a_large_vocabulary_are_found_with_what_chunks_would_save() -> None:
    finding = only_finding(RULE, headed(16384))

    assert finding.saved_bytes == 2 * 4 * TOKENS * 16384 * 7 // 8
    assert finding.where is not None
    assert finding.where.line == 70


def test_logits_that_are_a_small_part_of_the_peak_are_not_reported() -> None:
    assert diagnose(headed(4100), [RULE]).findings != ()
    assert diagnose(headed(1000), [RULE]).findings == ()


def test_a_loss_over_a_few_classes_is_left_alone() -> None:
    assert not list(RULE.check(headed(1000)))
