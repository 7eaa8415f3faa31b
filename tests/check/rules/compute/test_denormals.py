from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.denormals import RULE
from flatout.core.records.trial import TimeModel, TrialResult


def decaying(*, share: float = 0.1, device_s: float | None = None, flushed: str = "False") -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.model(run.line("train.py", 20, "out = net(x)"))
    line = run.line("model.py", 9, "weight = torch.exp(-d * d)")
    run.operator("aten.exp", line, op_s=0.04)
    run.fact("subnormal", line, kind="aten.exp", value=share, text="float32")
    run.setting("flush_denormal", flushed)
    return run


def test_subnormal_numbers_that_cost_time_are_found_at_their_line() -> None:
    run = decaying()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeModel(model=0, variant="flush-denormal", backward=True)
    run.tried(trial, kept=0.5)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 9


def test_a_processor_that_does_not_mind_is_left_alone() -> None:
    run = decaying()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_gain_within_the_spread_of_the_trial_is_none() -> None:
    run = decaying()
    [trial] = proposed(RULE, run.build())
    run.trial(TrialResult(trial=trial, now_s=0.0176, cured_s=0.0154, spread_fraction=0.28))
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_handful_flushed_ones_and_devices_are_not_tried() -> None:
    for run in (decaying(share=0.003), decaying(flushed="True"), decaying(device_s=0.09)):
        assert not proposed(RULE, run.build())
