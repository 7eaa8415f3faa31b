from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, tensor

from flatout.check.rules.compute.casts_dominate import RULE

DOUBLE, SINGLE = tensor(256, 256, dtype="float64"), tensor(256, 256)


def to_and_fro(*, between: str = "aten.tanh", text: str = "x = torch.tanh(x.double()).float()") -> EvidenceBuilder:
    """A tensor cast to float64, one operator, and back, on line 9."""
    run = EvidenceBuilder()
    line = run.line("model.py", 9, text)
    made = run.call(run.operator("aten.relu", line, inputs=[SINGLE], output=SINGLE))
    up = run.call(run.operator("aten._to_copy", line, inputs=[SINGLE], output=DOUBLE, op_s=0.006), made)
    inner = run.call(run.operator(between, line, inputs=[DOUBLE], output=DOUBLE), up)
    run.call(run.operator("aten._to_copy", line, inputs=[DOUBLE], output=SINGLE, op_s=0.004), inner)
    run.operator("aten._to_copy", line, inputs=[DOUBLE], output=SINGLE, op_s=0.005, phase="backward")
    return run


def test_casts_that_are_undone_are_found_with_their_backward() -> None:
    finding = only_finding(RULE, to_and_fro().build())
    assert abs(finding.cost_s - 0.015) < 1e-9
    assert finding.where is not None
    assert finding.where.line == 9


def test_a_cast_for_a_product_is_left_alone() -> None:
    assert not list(RULE.check(to_and_fro(between="aten.mm").build()))


def test_casts_that_nobody_spelt_out_are_autocasts_own() -> None:
    assert not list(RULE.check(to_and_fro(text="x = self.norm(x)").build()))


def cast_again(*, parts: bool) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line = run.line("model.py", 9, "y = layer(x.double())")
    made = run.call(run.operator("aten.relu", line, inputs=[SINGLE], output=SINGLE))
    if parts:
        run.call(run.operator("aten.slice", line, inputs=[SINGLE], output=SINGLE), made)
    cast = run.operator("aten._to_copy", line, inputs=[SINGLE], output=DOUBLE, op_s=0.01, calls=2)
    for _ in range(2):
        up = run.call(cast, made)
        run.call(run.operator("aten.mm", line, inputs=[DOUBLE, DOUBLE], output=DOUBLE), up)
    return run


def test_one_tensor_cast_twice_is_found() -> None:
    assert only_finding(RULE, cast_again(parts=False).build()).cost_s == 0.01


def test_different_parts_of_one_tensor_may_each_be_cast() -> None:
    assert not list(RULE.check(cast_again(parts=True).build()))
