from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.accidental_float64 import RULE
from flatout.core.records.trial import TimeInDtype

DOUBLE = tensor(256, 256, dtype="float64")


def in_float64(*, mm_s: float = 0.03, device_s: float | None = None) -> EvidenceBuilder:
    """A batch that comes in as float64 on line 12 of data.py, and a product of it on line 30 of model.py."""
    run = EvidenceBuilder(device_s=device_s)
    entrance = run.line("data.py", 12, "x = torch.as_tensor(row, dtype=torch.float64)")
    linear = run.line("model.py", 30, "return x @ self.weight")
    scalar = run.operator("aten._to_copy", run.line("data.py", 11), output=tensor(dtype="float64"), op_s=1e-6)
    made = run.operator("aten._to_copy", entrance, inputs=[tensor(256, 256)], output=DOUBLE, op_s=0.0001, phase="data")
    product = run.operator("aten.mm", linear, inputs=[DOUBLE, DOUBLE], output=DOUBLE, op_s=mm_s)
    run.operator("aten.relu", linear, inputs=[tensor(256, 256)], output=(256, 256), op_s=0.02)
    run.call(scalar)
    run.call(product, run.call(made, -1), -1)
    return run


def test_the_operators_that_take_the_time_are_tried_in_float32() -> None:
    assert proposed(RULE, in_float64().build()) == [TimeInDtype(operators=(2,), old="float64", new="float32")]


def test_the_line_that_brought_it_in_is_named() -> None:
    run = in_float64(mm_s=0.03)
    run.tried(*proposed(RULE, run.build()), kept=0.5)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.file, finding.where.line) == ("/home/ada/data.py", 12)
    assert finding.basis == "trial"
    assert finding.saved_s[0] < 0.5 * 0.03 < finding.saved_s[1]
    assert 3 not in finding.operators, "the float32 operator is no part of it"


def test_a_switch_thrown_before_the_steps_is_named_first() -> None:
    run = in_float64()
    run.setting("default_dtype", "torch.float64", run.line("train.py", 3, "torch.set_default_dtype(torch.float64)"))
    run.tried(*proposed(RULE, run.build()), kept=0.5)

    where = only_finding(RULE, run.build()).where

    assert where is not None
    assert (where.file, where.line) == ("/home/ada/train.py", 3)


def test_float64_that_was_there_before_the_step_is_named_where_it_is_used_first() -> None:
    run = EvidenceBuilder()
    product = run.operator("aten.mm", run.line("model.py", 30), inputs=[DOUBLE, DOUBLE], output=DOUBLE, op_s=0.03)
    run.call(product, -1, -1)
    run.tried(*proposed(RULE, run.build()), kept=0.5)

    where = only_finding(RULE, run.build()).where

    assert where is not None
    assert where.line == 30


def test_a_handful_of_scalars_is_left_alone() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 50, "running += loss.double()")
    for _ in range(5):
        run.operator("aten.add", line, inputs=[tensor(dtype="float64")], output=tensor(dtype="float64"), op_s=5e-6)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


@pytest.mark.parametrize("kept", [1.0, 1.3])
def test_a_trial_without_gain_is_not_reported(kept: float) -> None:
    run = in_float64()
    run.tried(*proposed(RULE, run.build()), kept=kept)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_float32_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.operator("aten.mm", run.line("model.py", 30), inputs=[(256, 256)], output=(256, 256), op_s=0.05)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_device_that_waits_for_the_host_gains_nothing_by_less_work() -> None:
    run = in_float64(mm_s=0.03, device_s=0.05)
    run.tried(*proposed(RULE, run.build()), kept=0.5)
    assert diagnose(run.build(), [RULE]).findings == ()
