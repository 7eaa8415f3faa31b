from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.bandwidth.activation_written_out import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TimeActivation, TrialResult

SHAPE = (64, 11, 192)
BY_TANH = ["pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"]
BY_ERF = ["div", "erf", "add", "mul", "mul"]
LSTM_CELL = ["tanh", "mul", "mul", "add"]


def formula(names: list[str], *, backward: bool = True) -> Evidence:
    run = EvidenceBuilder()
    line = run.line("model.py", 27, "return 0.5 * x * (1.0 + torch.tanh(...))")
    for name in names:
        run.operator(f"aten.{name}", line, inputs=[SHAPE], output=SHAPE, op_s=0.004)
    if backward:
        run.operator("aten.mul", line, inputs=[SHAPE], output=SHAPE, op_s=0.01, phase="backward")
    assert RULE.propose is not None
    run.trials.extend(TrialResult(trial=t, now_s=0.04, cured_s=0.01) for t in RULE.propose(run.build()))
    return run.build()


@pytest.mark.parametrize(("names", "kind"), [(BY_TANH, "tanh"), (BY_ERF, "erf")])
def test_the_formula_is_found_with_its_backward(names: list[str], kind: str) -> None:
    evidence = formula(names)
    finding = only_finding(RULE, evidence)
    assert finding.cost_s == pytest.approx(0.004 * len(names) + 0.01)
    assert finding.saved_s[0] < 0.75 * finding.cost_s < finding.saved_s[1]
    assert [t.trial for t in evidence.trials] == [
        TimeActivation(kind=kind, shape=SHAPE, dtype="float32", backward=True)
    ]  # type: ignore[arg-type]


def test_other_formulas_with_tanh_are_left_alone() -> None:
    assert not list(RULE.check(formula(LSTM_CELL)))
    assert not list(RULE.check(formula(["tanh", "add", "mul", "sub"])))
