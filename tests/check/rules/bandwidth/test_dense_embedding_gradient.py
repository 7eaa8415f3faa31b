from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.dense_embedding_gradient import RULE
from flatout.core.records.trial import TimeSparseEmbedding

TOKENS = tensor(32, 20, dtype="int64")


def looked_up(*, num_rows: int = 100_000, backward_s: float = 0.03) -> EvidenceBuilder:
    run = EvidenceBuilder(optimizer=0.02)
    made = run.line("train.py", 5, "optimizer = torch.optim.Adam(net.parameters())")
    run.optimizer(run.line("train.py", 30), constructed=made, step_s=0.02)
    run.fact("parameter-shapes", made, value=2, text=f"{num_rows}x10,10")
    run.operator(
        "aten.embedding_dense_backward",
        run.line("model.py", 9, "x = self.words(tokens)"),
        inputs=[(32, 20, 10), TOKENS],
        output=(num_rows, 10),
        op_s=backward_s,
        phase="backward",
    )
    return run


def test_backward_and_update_of_a_large_table_are_tried_sparse() -> None:
    run = looked_up()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeSparseEmbedding(operator=0, optimizer=0)
    run.tried(trial, kept=0.1)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 9
    assert finding.cost_s > 0.03, "the optimizer's share belongs to it"
    assert "SparseAdam" in finding.edit


def test_gradients_that_are_clipped_are_so_without_the_tables() -> None:
    run = looked_up()
    run.use("clip_grad_norm_", run.line("train.py", 30), 0.001)
    run.tried(*proposed(RULE, run.build()), kept=0.1)
    assert "clip_grad_norm_ on the other parameters alone" in only_finding(RULE, run.build()).edit


def test_a_table_that_a_batch_covers_is_left_alone() -> None:
    assert not proposed(RULE, looked_up(num_rows=1000).build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = looked_up()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_bag_of_embeddings_is_tried_too_and_what_only_the_trial_sees_counts() -> None:
    run = looked_up()
    bag = [(64, 10), tensor(640, dtype="int64"), tensor(64, dtype="int64")]
    run.operators.clear()
    line = run.line("model.py", 9)
    run.operator("aten._embedding_bag_backward", line, inputs=bag, output=(100_000, 10), op_s=0.03, phase="backward")
    (trial,) = proposed(RULE, run.build())
    run.tried(trial, kept=0.1, now_s=0.06)

    finding = only_finding(RULE, run.build())

    assert "EmbeddingBag" in finding.edit
    assert sum(finding.saved_s) / 2 == pytest.approx(0.9 * 0.06), (
        "zeroing and giving back the gradient's pages included"
    )


def test_the_optimizer_works_once_on_a_table_that_is_looked_up_twice() -> None:
    run = looked_up(backward_s=0.01)
    run.operator(
        "aten.embedding_dense_backward",
        run.line("model.py", 11, "tail = self.words(tails)"),
        inputs=[(32, 20, 10), TOKENS],
        output=(100_000, 10),
        op_s=0.01,
        phase="backward",
    )
    run.tried(*proposed(RULE, run.build()), kept=0.1, now_s=0.0)
    first, second = RULE.check(run.build())
    assert first.cost_s == pytest.approx(0.01 + 0.02, rel=0.01)
    assert second.cost_s == pytest.approx(0.01)
