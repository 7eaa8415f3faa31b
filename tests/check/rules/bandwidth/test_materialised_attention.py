from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.materialised_attention import RULE
from flatout.core.records.trial import TimeAttention

# B batch, N heads, T queries, S keys, H head dim
B, N, H = 4, 8, 64


def attend(run: EvidenceBuilder, *, queries: int, keys: int, masked: bool = True, times: int = 1) -> None:
    """Attention over four lines of model.py, `times` layers of it, 20 ms a layer, and its backward."""
    t, s = queries, keys
    lines = [run.line("model.py", n, function="Attention.forward") for n in (30, 31, 32, 33)]
    scores_f, scores_4 = (B * N, t, s), (B, N, t, s)
    share = {"calls": times, "module": "Net.attention"}
    product = run.operator(
        "aten.bmm", lines[0], inputs=[(B * N, t, H), (B * N, H, s)], output=scores_f, op_s=0.004 * times, **share
    )
    view = run.operator("aten.view", lines[0], inputs=[scores_f], output=scores_4, op_s=0, **share)
    mask = run.operator(
        "aten.masked_fill", lines[1], inputs=[scores_4, (1, 1, t, s)], output=scores_4, op_s=0.003 * times, **share
    )
    softmax = run.operator("aten._softmax", lines[2], inputs=[scores_4], output=scores_4, op_s=0.004 * times, **share)
    flat = run.operator("aten.view", lines[3], inputs=[scores_4], output=scores_f, op_s=0, **share)
    values = run.operator(
        "aten.bmm", lines[3], inputs=[scores_f, (B * N, s, H)], output=(B * N, t, H), op_s=0.004 * times, **share
    )
    for _ in range(times):
        call = run.call(view, run.call(product, -1, -1))
        if masked:
            call = run.call(mask, call, -1)
        run.call(values, run.call(flat, run.call(softmax, call)), -1)
    run.operator(
        "aten._softmax_backward_data",
        lines[2],
        inputs=[scores_4, scores_4],
        output=scores_4,
        op_s=0.005 * times,
        phase="backward",
        **share,
    )


def test_attention_is_tried_at_its_own_shape() -> None:
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256)

    trials = proposed(RULE, run.build())

    assert trials == [
        TimeAttention(
            batch=B,
            heads=N,
            q_len=256,
            kv_len=256,
            head_dim=H,
            dtype="float32",
            causal=True,
            masked=True,
            dropout=0.0,
            backward=True,
        )
    ]


def test_attention_to_something_else_is_tried_without_a_mask() -> None:
    run = EvidenceBuilder()
    attend(run, queries=128, keys=512, masked=False)

    [trial] = proposed(RULE, run.build())

    assert isinstance(trial, TimeAttention)
    assert (trial.q_len, trial.kv_len, trial.causal, trial.masked) == (128, 512, False, False)


def test_written_out_attention_is_named_at_its_softmax() -> None:
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256)
    run.tried(*proposed(RULE, run.build()), kept=0.25)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 32
    assert [s.line for s in finding.also] == [30, 31, 33]
    assert finding.basis == "trial"
    assert finding.cost_s == pytest.approx(0.020)
    assert finding.saved_s[0] < 0.75 * 0.020 < finding.saved_s[1]


def test_layers_that_share_their_lines_are_one_finding() -> None:
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256, times=3)
    run.tried(*proposed(RULE, run.build()), kept=0.25)
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.060)


def test_a_trial_without_gain_is_not_reported() -> None:
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256)
    run.tried(*proposed(RULE, run.build()), kept=1.05)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_short_sequences_are_left_alone() -> None:
    run = EvidenceBuilder()
    attend(run, queries=16, keys=16)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_softmax_that_no_product_follows_is_left_alone() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 60, "probabilities = torch.softmax(self.head(x) @ self.table, dim=-1)")
    product = run.operator("aten.bmm", line, inputs=[(4, 256, 64), (4, 64, 512)], output=(4, 256, 512), op_s=0.02)
    softmax = run.operator("aten._softmax", line, inputs=[(4, 256, 512)], output=(4, 256, 512), op_s=0.02)
    total = run.operator("aten.sum", line, inputs=[(4, 256, 512)], output=(4, 256))
    run.call(total, run.call(softmax, run.call(product, -1, -1)))
    assert not proposed(RULE, run.build())


def test_a_softmax_that_no_product_leads_to_is_left_alone() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 60, "mixed = torch.softmax(self.table, dim=-1) @ x")
    softmax = run.operator("aten._softmax", line, inputs=[(4, 256, 512)], output=(4, 256, 512), op_s=0.02)
    product = run.operator("aten.bmm", line, inputs=[(4, 256, 512), (4, 512, 64)], output=(4, 256, 64), op_s=0.02)
    run.call(product, run.call(softmax, -1), -1)
    assert not proposed(RULE, run.build())


def test_only_what_touches_the_scores_is_claimed() -> None:
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256)
    line = run.line("model.py", 30)  # q, k and scores on one line
    projection = run.operator("aten.mm", line, inputs=[(256, 512), (512, 1536)], output=(256, 1536), op_s=0.03)
    run.tried(*proposed(RULE, run.build()), kept=0.25)
    assert projection not in only_finding(RULE, run.build()).operators


@pytest.mark.parametrize("drops", [True, False])
def test_weights_that_are_dropped_are_so_in_the_trial_and_by_the_edit(drops: bool) -> None:
    """On a CPU dropout draws its mask into a tensor of its own, which no chain of results leads to."""
    run = EvidenceBuilder()
    attend(run, queries=256, keys=256)
    scores = (B, N, 256, 256)
    draw = run.operator("aten.bernoulli_", run.line("model.py", 33), inputs=[scores], output=scores, op_s=1e-3)
    if drops:
        run.calls.insert(len(run.calls) - 1, (draw, (-1,)))
    [trial] = proposed(RULE, run.build())
    assert isinstance(trial, TimeAttention)
    assert (trial.dropout > 0) == drops
    run.tried(trial, kept=0.25)
    assert ("dropout_p=p if self.training else 0.0" in only_finding(RULE, run.build()).edit) == drops
