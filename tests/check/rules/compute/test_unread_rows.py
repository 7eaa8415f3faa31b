from __future__ import annotations

import pytest
import torch
from tests.check.observe.test_observer import observe
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed
from torch import nn

from flatout.check.rules.compute.unread_rows import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TrialResult

ROWS, INNER, COLUMNS = 80, 64, 1000


def logits(*, read: int, reader: str = "aten.clone", escapes: tuple[int, ...] = (), columns: int = COLUMNS) -> Evidence:
    """Logits of all words (line 9), a log-softmax of them (line 10), and a slice of `read` rows that line 30 reads."""
    run = EvidenceBuilder()
    head, softmax, loss = run.line("model.py", 9), run.line("model.py", 10), run.line("train.py", 30, "out[:, half:]")
    product = run.operator(
        "aten.addmm", head, inputs=[(COLUMNS,), (ROWS, INNER), (INNER, COLUMNS)], output=(ROWS, COLUMNS), op_s=0.03
    )
    by_row = run.operator("aten._log_softmax", softmax, inputs=[(ROWS, COLUMNS)], output=(ROWS, COLUMNS), op_s=0.01)
    view = run.operator("aten.slice", loss, inputs=[(ROWS, COLUMNS)], output=(read, columns), op_s=0.0)
    some = run.operator(reader, loss, inputs=[(read, columns)], output=(read, columns), op_s=0.001)
    run.operator(
        "aten.mm", head, inputs=[(ROWS, COLUMNS), (COLUMNS, INNER)], output=(ROWS, INNER), op_s=0.02, phase="backward"
    )
    first = run.call(product, -1, -1, -1)
    second = run.call(by_row, first)
    run.call(view, second)
    run.call(some, second)
    run.escapes = escapes
    evidence = run.build()
    results = tuple(TrialResult(trial=t, now_s=0.02, cured_s=0.008) for t in RULE.propose(evidence) if RULE.propose)
    run.trials.extend(results)
    return run.build()


def test_logits_of_which_a_slice_is_read_are_found_with_what_follows_row_by_row() -> None:
    finding = only_finding(RULE, logits(read=32))
    assert finding.where is not None
    assert finding.where.line == 9
    assert [place.line for place in finding.also] == [30]
    assert finding.cost_s == pytest.approx(0.03 + 0.01 + 0.02)
    assert finding.saved_s[1] == pytest.approx(0.06 * (1 - 0.4))
    assert "80 rows of 1000 numbers" in finding.because


@pytest.mark.slow
def test_the_time_steps_of_a_recurrent_layer_are_all_read() -> None:
    """torch splits the projections of all time steps with unsafe_split, whose results do not say that they are views."""
    gru, head = nn.GRU(512, 32), nn.Linear(32, 3)

    def loop() -> None:
        optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            states, _ = gru(torch.randn(24, 16, 512))
            head(states[-1]).square().mean().backward()
            optimizer.step()

    assert not proposed(RULE, observe(loop))


@pytest.mark.parametrize(
    "evidence",
    [
        logits(read=ROWS),
        logits(read=70),
        logits(read=32, escapes=(1,)),
        logits(read=32, columns=10),
    ],
    ids=["all are read", "nearly all are read", "kept for later", "a slice of columns"],
)
def test_what_is_read_otherwise_is_no_cause(evidence: Evidence) -> None:
    assert not list(RULE.check(evidence))
