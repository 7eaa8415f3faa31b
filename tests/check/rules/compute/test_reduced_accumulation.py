from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, tensor

from flatout.check.rules.compute.reduced_accumulation import RULE

HALF = tensor(256, 256, dtype="bfloat16")


def asked_for_float32(*, by_user: bool = True, allowed: str = "True") -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=0.09)
    line = run.line("train.py", 3, "torch.set_float32_matmul_precision('highest')") if by_user else -1
    run.setting("float32_matmul_precision", "highest", line)
    run.setting("bf16_reduced_precision_reduction", allowed)
    run.operator("aten.mm", run.line("model.py", 9), inputs=[HALF, HALF], output=HALF)
    return run


def test_a_wish_for_accuracy_that_half_precision_sums_ignore_is_told() -> None:
    assert RULE.note is not None
    (note,) = RULE.note(asked_for_float32().build())
    assert note.where is not None
    assert note.where.line == 3
    assert "allow_bf16_reduced_precision_reduction" in note.text


def test_defaults_and_full_sums_are_left_alone() -> None:
    assert RULE.note is not None
    assert not list(RULE.note(asked_for_float32(by_user=False).build()))
    assert not list(RULE.note(asked_for_float32(allowed="False").build()))
    assert not list(RULE.check(asked_for_float32().build()))
