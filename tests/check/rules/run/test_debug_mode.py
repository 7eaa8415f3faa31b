from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.debug_mode import RULE
from flatout.core.records.trial import TimeModel


def run_with(name: str, value: str = "True") -> EvidenceBuilder:
    """Training with a switch thrown on line 5 of train.py."""
    run = EvidenceBuilder(forward=0.04, backward=0.05)
    run.model(run.line("train.py", 20))
    run.setting(name, value, run.line("train.py", 5))
    return run


@pytest.mark.parametrize(
    ("name", "variant"),
    [("detect_anomaly", "without-anomaly"), ("deterministic_algorithms", "deterministic-off")],
)
def test_a_mode_that_is_on_is_tried_off(name: str, variant: str) -> None:
    [trial] = proposed(RULE, run_with(name).build())
    assert isinstance(trial, TimeModel)
    assert (trial.model, trial.variant, trial.backward) == (0, variant, True)


def test_the_line_that_threw_the_switch_is_named() -> None:
    run = run_with("detect_anomaly")
    run.tried(*proposed(RULE, run.build()), kept=0.4)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (5, "trial")
    assert finding.saved_s[0] < 0.6 * 0.09 < finding.saved_s[1]


@pytest.mark.parametrize("name", ["detect_anomaly", "deterministic_algorithms"])
def test_a_mode_that_is_off_is_left_alone(name: str) -> None:
    run = run_with(name, "False")
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


@pytest.mark.parametrize("kept", [1.0, 1.1])
def test_a_mode_that_costs_nothing_is_not_reported(kept: float) -> None:
    run = run_with("deterministic_algorithms")
    run.tried(*proposed(RULE, run.build()), kept=kept)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_run_without_backward_is_not_tried() -> None:
    run = EvidenceBuilder(kind="inference")
    run.model(run.line("serve.py", 20), is_training=False, graphs_built=0, graphs_used=0)
    run.setting("detect_anomaly", "True")
    assert not proposed(RULE, run.build())


def test_an_environment_that_slows_torch_down_is_a_note() -> None:
    diagnosis = diagnose(run_with("CUDA_LAUNCH_BLOCKING", "1").build(), [RULE])
    assert diagnosis.findings == ()
    assert ["CUDA_LAUNCH_BLOCKING" in note.text for note in diagnosis.notes] == [True]


def test_an_environment_variable_set_to_0_is_left_alone() -> None:
    assert diagnose(run_with("CUDA_LAUNCH_BLOCKING", "0").build(), [RULE]).notes == ()
