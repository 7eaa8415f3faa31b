from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.compute.frozen_in_optimizer import RULE
from flatout.core.records.trial import TimeModel


def with_idle_body(*, backward_s: float = 0.03) -> EvidenceBuilder:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, "loss = net(x).mean()"))
    body = run.line("model.py", 8, "x = self.body(x)")
    run.operator("aten.mm", body, phase="backward", module="Net.body", op_s=backward_s)
    made = run.line("train.py", 5, "optimizer = Adam([{'params': body, 'lr': 0.0}, ...])")
    run.fact("zero-rate", made, module="Net.body", kind="Linear", value=1e6)
    return run


def test_a_rate_of_zero_is_priced_by_freezing() -> None:
    run = with_idle_body()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeModel(model=0, variant="frozen", backward=True, modules=("Net.body",))
    run.tried(trial, kept=0.7)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 5
    assert finding.saved_s[1] <= 1.2 * 0.03


def test_a_cheap_backward_is_not_tried() -> None:
    assert not proposed(RULE, with_idle_body(backward_s=0.001).build())


def test_parameters_without_gradient_are_a_note_and_no_finding() -> None:
    run = EvidenceBuilder()
    made = run.line("train.py", 5, "optimizer = Adam(net.parameters())")
    for name in ("Net.a", "Net.b", "Net.c", "Net.d"):
        run.fact("no-gradient", made, module=name, value=10)
    assert RULE.note is not None
    (note,) = RULE.note(run.build())
    assert "40 parameters" in note.text
    assert "and 1 more" in note.text
    assert not list(RULE.check(run.build()))


def test_an_optimizer_whose_parameters_all_learn_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.model()
    assert RULE.note is not None
    assert not list(RULE.note(run.build()))
    assert not proposed(RULE, run.build())
