from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.dense_mask_attention import RULE
from flatout.core.records.trial import TimeAttentionCall

Q = (2, 4, 1024, 32)
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


def masked(kind: str) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line = run.line("model.py", 12, "y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)")
    run.operator(FLASH, line, inputs=[Q, Q, Q, (1024, 1024)], output=Q, op_s=0.02)
    run.operator(f"{FLASH}_backward", line, inputs=[Q, Q, Q, Q], output=Q, op_s=0.03, phase="backward")
    run.fact("attention-mask", line, kind=kind, value=0.5)
    return run


def test_a_causal_mask_is_tried_as_a_flag() -> None:
    run = masked("causal")
    (trial,) = proposed(RULE, run.build())
    assert isinstance(trial, TimeAttentionCall)
    assert (trial.q_len, trial.kv_len, trial.head_dim, trial.backward, trial.cure) == (1024, 1024, 32, True, "causal")
    run.tried(trial, kept=0.5)
    finding = only_finding(RULE, run.build())
    assert "is_causal=True" in finding.edit
    assert finding.saved_s[0] < 0.025 < finding.saved_s[1]


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    (trial,) = proposed(RULE, masked("all-true").build())
    assert isinstance(trial, TimeAttentionCall)
    assert trial.cure == "no-mask"


def test_padding_and_biases_are_left_alone() -> None:
    for kind in ("padding", "bias", "other"):
        assert not proposed(RULE, masked(kind).build())
        assert not list(RULE.check(masked(kind).build()))


def test_masks_that_hide_most_pairs_are_a_note() -> None:
    assert RULE.note is not None
    for kind, says in (
        ("documents", "keeps documents apart"),
        ("window", "is a window"),
        ("sparse", "hides most pairs"),
    ):
        assert not proposed(RULE, masked(kind).build())
        (note,) = RULE.note(masked(kind).build())
        assert says in note.text
        assert "50%" in note.text


def test_a_trial_without_gain_is_not_reported() -> None:
    run = masked("causal")
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()
