from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.split_linears import RULE
from flatout.core.records.trial import TimeMergedLinears


def projected(*, one_input: bool = True, parts: bool = False) -> EvidenceBuilder:
    """q, k and v projected on lines 11 to 13 from the result of a norm."""
    run = EvidenceBuilder()
    norm = run.operator("aten.native_layer_norm", run.line("model.py", 9), inputs=[(64, 32)], output=(64, 32))
    source = run.call(norm)
    if parts:
        run.call(run.operator("aten.split", run.line("model.py", 10), inputs=[(64, 32)]), source)
    for number in range(3):
        line = run.line("model.py", 11 + number, f"{'qkv'[number]} = self.{'qkv'[number]}(x)")
        row = run.operator("aten.addmm", line, inputs=[(48,), (64, 32), (32, 48)], output=(64, 48), op_s=0.01)
        run.operator("aten.mm", line, inputs=[(64, 48), (48, 32)], output=(64, 32), op_s=0.01, phase="backward")
        run.call(row, -1, source if one_input else run.call(norm), -1)
    return run


def test_layers_on_one_tensor_are_tried_as_one() -> None:
    run = projected()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeMergedLinears(
        rows=64, in_features=32, out_features=(48, 48, 48), dtype="float32", bias=True, backward=True
    )
    run.tried(trial, kept=0.6)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 11
    assert [s.line for s in finding.also] == [12, 13]


def test_layers_on_different_tensors_or_parts_of_one_are_left_alone() -> None:
    assert not proposed(RULE, projected(one_input=False).build())
    assert not proposed(RULE, projected(parts=True).build())


def test_one_layer_that_is_run_twice_on_a_tensor_is_left_alone() -> None:
    run = EvidenceBuilder()
    norm = run.operator("aten.native_layer_norm", run.line("model.py", 9), inputs=[(64, 32)], output=(64, 32))
    source = run.call(norm)
    row = run.operator(
        "aten.addmm", run.line("model.py", 11), inputs=[(48,), (64, 32), (32, 48)], output=(64, 48), op_s=0.02
    )
    run.call(row, -1, source, -1)
    run.call(row, -1, source, -1)

    assert not proposed(RULE, run.build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = projected()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()
