from __future__ import annotations

import pytest
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.throttled import RULE


def notes(*, fraction: float | None, reasons: tuple[str, ...] = (), device_s: float = 0.098) -> list[str]:
    evidence = with_device(EvidenceBuilder(device_s=device_s), clock_fraction=fraction, throttle_reasons=reasons)
    diagnosis = diagnose(evidence, [RULE])
    assert diagnosis.findings == ()
    return [n.text for n in diagnosis.notes]


def test_a_held_back_clock_is_noted_with_the_drivers_reason() -> None:
    [text] = notes(fraction=0.7, reasons=("temperature (hardware)",))
    assert "70%" in text
    assert "temperature" in text


def test_a_low_clock_without_a_reason_is_noted() -> None:
    assert len(notes(fraction=0.7)) == 1


@pytest.mark.parametrize("fraction", [0.95, None])
def test_a_full_or_unknown_clock_is_not(fraction: float | None) -> None:
    assert notes(fraction=fraction) == []


def test_a_device_that_waits_for_the_host_may_rest() -> None:
    assert notes(fraction=0.4, reasons=("power limit",), device_s=0.05) == []
