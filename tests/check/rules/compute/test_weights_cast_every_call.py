from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, tensor

from flatout.check.rules.compute.weights_cast_every_call import RULE
from flatout.core.records.evidence import StepKind

WEIGHT, INPUT = (1000, 900), (8, 900)


def scoring(*, kind: StepKind = "inference", to: str = "bfloat16", made: bool = False) -> EvidenceBuilder:
    """A model of a million weights, called on line 12, casts a weight of 900 thousand and its input in every call."""
    run = EvidenceBuilder(kind=kind)
    line = run.line("score.py", 12, "scores = model(rows)", loops=(10,))
    run.model(line, graphs_built=0, graphs_used=0)
    inside = run.line("model.py", 3, "return self.head(x)")
    norm = run.call(run.operator("aten.native_layer_norm", inside, inputs=[INPUT], output=INPUT))
    weight = run.operator(
        "aten._to_copy", inside, inputs=[tensor(*WEIGHT)], output=tensor(*WEIGHT, dtype=to), op_s=0.030
    )
    run.call(weight, norm if made else -1)
    own = run.operator("aten._to_copy", inside, inputs=[tensor(*INPUT)], output=tensor(*INPUT, dtype=to), op_s=0.002)
    run.call(own, norm)
    return run


def test_weights_cast_in_an_inference_loop_are_named_at_the_call() -> None:
    finding = only_finding(RULE, scoring().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (12, pytest.approx(0.030))
    assert finding.saved_s == pytest.approx((0.027, 0.032))
    assert "0.9 M numbers" in finding.because


def test_weights_that_are_trained_are_left_alone() -> None:
    assert not list(RULE.check(scoring(kind="training").build()))


def test_what_the_step_itself_made_is_no_weight() -> None:
    assert not list(RULE.check(scoring(made=True).build()))


def test_another_cast_is_left_alone() -> None:
    assert not list(RULE.check(scoring(to="float64").build()))
