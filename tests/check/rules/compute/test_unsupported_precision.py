from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.unsupported_precision import RULE
from flatout.core.records.trial import TimeModel

HALF = tensor(64, 256, dtype="bfloat16")


def under_autocast(*, dtype: str = "bfloat16", device_s: float | None = None) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.model(run.line("train.py", 20, "out = net(x)"))
    half = tensor(64, 256, dtype=dtype)
    run.operator("aten.mm", run.line("model.py", 9), inputs=[half, half], output=half, op_s=0.04)
    return run


def test_float32_that_is_faster_is_found() -> None:
    run = under_autocast()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeModel(model=0, variant="float32", backward=True)
    run.tried(trial, kept=0.6)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 20


def test_a_processor_with_units_for_it_is_left_alone() -> None:
    run = under_autocast()
    run.tried(*proposed(RULE, run.build()), kept=1.4)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_float32_and_devices_are_not_tried() -> None:
    assert not proposed(RULE, under_autocast(dtype="float32").build())
    assert not proposed(RULE, under_autocast(device_s=0.09).build())
