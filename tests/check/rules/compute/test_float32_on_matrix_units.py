from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.float32_on_matrix_units import RULE


def on_a_gpu(*, precision: str = "highest", device_s: float | None = 0.095) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.model(run.line("train.py", 20, "out = net(x)"))
    run.operator("aten.addmm", run.line("model.py", 9), inputs=[(256, 256), (256, 256)], op_s=0.06)
    run.setting("float32_matmul_precision", precision)
    return run


def test_tf32_is_tried_and_priced() -> None:
    run = on_a_gpu()
    [trial] = proposed(RULE, run.build())
    run.tried(trial, kept=0.5)
    finding = only_finding(RULE, run.build())
    assert finding.saved_s[0] < 0.09 * 0.5 < finding.saved_s[1]
    assert "set_float32_matmul_precision" in finding.edit


def test_convolutions_use_tf32_unless_it_is_forbidden() -> None:
    run = EvidenceBuilder(device_s=0.095)
    run.model(run.line("train.py", 20, "out = net(x)"))
    run.operator("aten.convolution", run.line("model.py", 9), inputs=[(8, 3, 64, 64), (8, 3, 3, 3)], op_s=0.06)
    assert not proposed(RULE, run.build())
    run.setting("cudnn_allow_tf32", "False")
    assert len(proposed(RULE, run.build())) == 1


def test_tf32_that_is_on_autocast_and_cpus_are_left_alone() -> None:
    assert not proposed(RULE, on_a_gpu(precision="high").build())
    assert not proposed(RULE, on_a_gpu(device_s=None).build())
    run = on_a_gpu()
    run.fact("autocast", 0, text="cuda:bfloat16")
    assert not proposed(RULE, run.build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = on_a_gpu()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()
