from __future__ import annotations

import msgspec
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.allocator_retries import RULE
from flatout.core.records.device import HostWait
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Memory


def allocating(*, seconds: float = 0.02, retries: int = 0, clears: float = 0.0, device_s: float = 0.07) -> Evidence:
    run = EvidenceBuilder(device_s=device_s)
    line = run.line("model.py", 9, "scores = q @ k.transpose(-2, -1)")
    waits = (
        [HostWait(source=line, call=c, num=4, seconds=seconds / 2) for c in ("cudaMalloc", "cudaFree")]
        if seconds
        else []
    )
    memory = Memory(
        device="cuda:0", peak_bytes=10**10, peak_phase="forward", num_retries=retries, num_cache_clears=clears
    )
    return msgspec.structs.replace(with_device(run, waits=waits), memory=(memory,))


def test_going_to_the_driver_in_each_step_is_priced_by_its_time() -> None:
    finding = only_finding(RULE, allocating(retries=3))
    assert finding.where is not None
    assert finding.where.line == 9
    assert "3 times" in finding.because


def test_retries_without_time_in_the_step_are_a_note() -> None:
    diagnosis = diagnose(allocating(seconds=0.0, retries=3), [RULE])
    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1


def test_while_the_device_is_busy_it_costs_nothing() -> None:
    assert diagnose(allocating(device_s=0.0995), [RULE]).findings == ()


def test_a_cleared_cache_has_a_rule_of_its_own() -> None:
    diagnosis = diagnose(allocating(clears=1.0, retries=1), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())
