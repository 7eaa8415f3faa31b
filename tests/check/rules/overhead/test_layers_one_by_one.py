from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.layers_one_by_one import RULE
from flatout.core.records.evidence import TensorSpec
from flatout.core.records.trial import TimeStackedLinears

COLUMN = TensorSpec(shape=(128, 1), dtype="float32", is_contiguous=False)


def one_by_one(
    *, num: int = 16, in_chain: bool = False, column: TensorSpec = COLUMN, op_s: float = 0.002
) -> EvidenceBuilder:
    """A model whose `num` equal layers each take a column of the batch, with their backward and an optimizer."""
    run = EvidenceBuilder(backward=0.04)
    loop = run.line("model.py", 29, "parts = [f(x) for f, x in zip(self.parts, columns)]")
    line = run.line("model.py", 19, "return self.lift(value)", callers=(loop,))
    before = -1
    for number in range(num):
        module = f"Net.parts.{number}.lift"
        inputs = [tensor(48), column, tensor(1, 48)]
        row = run.operator("aten.addmm", line, inputs=inputs, output=(128, 48), op_s=op_s, module=module)
        run.operator(
            "aten.mm", line, inputs=[(48, 128), column], output=(48, 1), op_s=op_s, phase="backward", module=module
        )
        before = run.call(row, -1, before if in_chain else -1, -1)
    run.optimizer(num_tensors=2 * num, num_elements=96 * num, step_s=0.004)
    return run


def test_equal_layers_are_tried_as_one_product_and_told_where_they_are_called() -> None:
    run = one_by_one()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeStackedLinears(
        num=16, rows=128, in_features=1, out_features=48, dtype="float32", bias=True, backward=True
    )
    run.tried(trial, kept=0.1)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.module) == (29, "Net.parts")
    assert len(finding.operators) == 32
    assert sum(finding.saved_s) / 2 == pytest.approx(0.9 * 32 * 0.002 + 0.004), "the optimizer's tensors become two"


def test_layers_in_a_chain_are_left_alone() -> None:
    assert not proposed(RULE, one_by_one(in_chain=True).build())


def test_layers_whose_weights_alone_are_multiplied_independently_are_a_chain_all_the_same() -> None:
    run = one_by_one()
    apply = run.line("model.py", 20, "return x + self.lift(x)")
    before = -1
    for number in range(16):
        row = run.operator(
            "aten.add", apply, inputs=[(128, 48), (128, 48)], output=(128, 48), module=f"Net.parts.{number}"
        )
        before = run.call(row, before, -1)

    assert not proposed(RULE, run.build())


def test_layers_that_read_one_whole_tensor_are_another_rules_affair() -> None:
    assert not proposed(RULE, one_by_one(column=tensor(128, 1)).build())


def test_a_few_layers_and_cheap_ones_are_left_alone() -> None:
    assert not proposed(RULE, one_by_one(num=3).build())
    assert not proposed(RULE, one_by_one(op_s=0.00001).build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = one_by_one()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()
