"""Operators are told by the timed step, not by the steps that happened to lie beside the recorded ones."""

from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.accidental_float64 import RULE
from flatout.check.timed_step import in_timed_step
from flatout.core.records.evidence import Evidence


def in_float64(*, step_s: float, nearby_s: float | None, op_s: float) -> Evidence:
    """A step whose products are float64, recorded where steps took `nearby_s`."""
    run = EvidenceBuilder(step_s=step_s, data=0.0)
    line = run.line("model.py", 3, "y = x @ w")
    wide = tensor(64, 64, dtype="float64")
    run.operator("aten.mm", line, inputs=[wide, wide], output=wide, op_s=op_s)
    run.tried(*RULE.propose(run.build()), kept=0.3)
    evidence = run.build()
    return msgspec.structs.replace(
        evidence, observing=msgspec.structs.replace(evidence.observing, nearby_step_s=nearby_s)
    )


def test_what_a_machine_that_slowed_down_recorded_is_no_more_than_the_step() -> None:
    evidence = in_float64(step_s=0.093, nearby_s=0.113, op_s=0.104)

    diagnosis = diagnose(evidence, [RULE])

    assert not diagnosis.broken
    assert diagnosis.findings[0].share == pytest.approx(0.104 / 0.113, rel=0.01)


def test_operators_and_constants_are_scaled_alike() -> None:
    run = EvidenceBuilder(step_s=0.1)
    line = run.line("model.py", 3, "mask = torch.ones(8, 8).tril()")
    row = run.operator("aten.tril", line, op_s=0.02, python_s=0.01)
    run.constant(line, seconds=0.03, operators=(row,))
    evidence = run.build()
    observing = msgspec.structs.replace(evidence.observing, nearby_step_s=0.2)

    scaled = in_timed_step(msgspec.structs.replace(evidence, observing=observing))

    assert (scaled.operators[row].op_s, scaled.operators[row].python_s) == pytest.approx((0.01, 0.005))
    assert scaled.constants[0].seconds == pytest.approx(0.015)
    assert in_timed_step(scaled) == scaled


def test_what_has_no_light_steps_beside_it_stays_as_it_is() -> None:
    evidence = in_float64(step_s=0.1, nearby_s=None, op_s=0.05)
    assert in_timed_step(evidence) is evidence
