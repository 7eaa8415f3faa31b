from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.rules.compute.one_hot_product import RULE
from flatout.core.records.trial import TimeOneHot


def one_hot(
    *, ones: int = 1, classes: int = 4000, multiplied: bool = True, run: EvidenceBuilder | None = None
) -> EvidenceBuilder:
    """512 rows with `ones` ones each, multiplied with a matrix of 64 columns: 30 ms of a step of 100."""
    run = run or EvidenceBuilder()
    making = run.line("model.py", 10, "x = F.one_hot(t, V).float()")
    line = run.line("model.py", 11, "return self.inp(x)")
    whole = (512, classes)
    zeros = run.operator("aten.zeros", making, output=whole, op_s=0.004)
    scatter = run.operator("aten.scatter_", making, inputs=[whole], output=whole, op_s=0.002)
    run.operators[scatter] = msgspec.structs.replace(
        run.operators[scatter], inputs=(tensor(*whole, dtype="int64"), tensor(512, ones, dtype="int64"))
    )
    copy = run.operator("aten._to_copy", making, inputs=[whole], output=whole, op_s=0.004)
    mm = run.operator(
        "aten.mm" if multiplied else "aten.sum", line, inputs=[whole, (classes, 64)], output=(512, 64), op_s=0.01
    )
    run.operator("aten.mm", line, inputs=[(classes, 512), (512, 64)], output=(classes, 64), op_s=0.01, phase="backward")
    made = run.call(copy, run.call(scatter, run.call(zeros)))
    run.call(mm, made)
    return run


def test_the_product_is_tried_against_an_embedding() -> None:
    assert proposed(RULE, one_hot().build()) == [
        TimeOneHot(rows=512, classes=4000, width=64, dtype="float32", backward=True)
    ]


def test_making_and_multiplying_are_claimed_at_the_line_that_makes_the_rows() -> None:
    run = one_hot()
    run.tried(*proposed(RULE, run.build()), kept=0.1)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 10
    assert abs(finding.cost_s - 0.03) < 1e-9


def test_rows_with_several_ones_are_no_lookup() -> None:
    assert not proposed(RULE, one_hot(ones=3).build())


def test_a_few_classes_do_not_matter() -> None:
    assert not proposed(RULE, one_hot(classes=10).build())


def test_one_hot_rows_that_are_not_multiplied_are_left_alone() -> None:
    assert not proposed(RULE, one_hot(multiplied=False).build())


def test_two_products_of_one_line_are_one_finding() -> None:
    """One class of module, two tables: both make their one-hot rows on the same line."""
    run = one_hot(classes=3000, run=one_hot())
    run.tried(*proposed(RULE, run.build()), kept=0.1)

    both = only_finding(RULE, run.build())

    assert both.cost_s == pytest.approx(0.06)
    assert sum(both.saved_s) / 2 == pytest.approx(0.9 * 0.9 * 0.06)
    assert "nn.Embedding(4000, 64), nn.Embedding(3000, 64)" in both.edit
