from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.host_read import RULE


def reading(
    *, device_s: float | None = 0.06, wait_s: float = 0.03, calls: float = 1.0, on_device: bool = True
) -> EvidenceBuilder:
    """`.item()` on line 29 of train.py, on a device that works `device_s` of a step of 100 ms."""
    run = EvidenceBuilder(device_s=device_s)
    run.host_read(run.line("train.py", 29, "total += loss.item()"), calls=calls, wait_s=wait_s, on_device=on_device)
    return run


def test_a_wait_on_an_idle_device_is_named() -> None:
    finding = only_finding(RULE, reading(device_s=0.06, wait_s=0.03).build())
    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (29, "timed")
    assert finding.saved_s[1] == pytest.approx(0.03)


def test_no_more_is_saved_than_the_device_idles() -> None:
    finding = only_finding(RULE, reading(device_s=0.08, wait_s=0.05).build())
    assert finding.cost_s == pytest.approx(0.05)
    assert finding.saved_s[1] == pytest.approx(0.02)


def test_two_lines_share_the_idle_time() -> None:
    run = reading(device_s=0.06, wait_s=0.06)
    run.host_read(run.line("train.py", 30), wait_s=0.02, on_device=True)
    assert sum(f.saved_s[1] for f in RULE.check(run.build())) <= 0.04 + 1e-12


def test_a_read_after_the_device_has_drained_is_only_a_note() -> None:
    diagnosis = diagnose(reading(device_s=0.1, wait_s=0.03).build(), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [29]


def test_a_read_once_in_many_steps_is_left_alone() -> None:
    diagnosis = diagnose(reading(calls=0.02).build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())


def test_on_a_cpu_it_is_only_a_note() -> None:
    diagnosis = diagnose(reading(device_s=None, wait_s=0.03, on_device=False).build(), [RULE])
    assert diagnosis.findings == ()
    [note] = diagnosis.notes
    assert note.where is not None
    assert note.where.line == 29


def test_a_line_that_is_reported_is_not_noted_as_well() -> None:
    diagnosis = diagnose(reading(device_s=0.06, wait_s=0.03).build(), [RULE])
    assert len(diagnosis.findings) == 1
    assert diagnosis.notes == ()


def test_several_reads_on_one_line_are_one_finding() -> None:
    run = reading(wait_s=0.01)
    run.host_read(run.line("train.py", 29), call="tolist", wait_s=0.02, on_device=True)
    finding = only_finding(RULE, run.build())
    assert finding.cost_s == pytest.approx(0.03)
