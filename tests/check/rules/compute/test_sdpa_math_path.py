from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, proposed

from flatout.check.rules.compute.sdpa_math_path import RULE
from flatout.core.records.trial import TimeAttentionCall

SCORES, Q = (2, 4, 256, 256), (8, 256, 32)


def attention(*, softmax: str = "aten._safe_softmax", dropout: bool = True, tokens: int = 256) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line = run.line("model.py", 12, "y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)")
    scores = (2, 4, tokens, tokens)
    run.operator("aten.bmm", line, inputs=[(8, tokens, 32), (8, 32, tokens)], output=(8, tokens, tokens), op_s=0.01)
    run.operator(softmax, line, inputs=[scores], output=scores, op_s=0.02)
    if dropout:
        run.operator("aten.bernoulli_", line, inputs=[scores], output=scores, op_s=0.01)
    return run


def test_dropout_that_keeps_attention_from_its_kernel_is_tried_without_and_told_in_a_note() -> None:
    assert RULE.note is not None
    run = attention()
    (trial,) = proposed(RULE, run.build())
    assert isinstance(trial, TimeAttentionCall)
    assert (trial.head_dim, trial.masked, trial.cure) == (32, False, "no-dropout")
    run.tried(trial, kept=0.4)

    [note] = RULE.note(run.build())

    assert "takes 40% of that (tried)" in note.text
    assert not list(RULE.check(run.build())), "another experiment is no gain"


def test_dropout_is_told_without_a_figure_where_it_was_not_tried() -> None:
    assert RULE.note is not None
    [note] = RULE.note(attention().build())
    assert "with dropout_p=0.0 the regularisation is another one" in note.text


def test_dropout_whose_absence_gains_nothing_is_left_alone() -> None:
    assert RULE.note is not None
    run = attention()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert not list(RULE.note(run.build()))


def test_another_reason_is_a_note() -> None:
    run = attention(dropout=False)
    assert RULE.note is not None
    assert not proposed(RULE, run.build())
    assert len(list(RULE.note(run.build()))) == 1


def test_attention_written_by_hand_and_short_sequences_are_left_alone() -> None:
    assert RULE.note is not None
    for run in (attention(softmax="aten._softmax"), attention(tokens=8)):
        assert not proposed(RULE, run.build())
        assert not list(RULE.note(run.build()))
