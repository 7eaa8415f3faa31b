from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.fresh_pages import RULE


def faulting(*, faults: float = 8000.0, kernel_s: float = 0.012, device_s: float | None = None) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.pages(run.line("model.py", 30, "return self.body(points)"), faults=faults, kernel_s=kernel_s)
    return run


def test_the_kernels_time_is_told_at_the_line_with_most_faults() -> None:
    finding = only_finding(RULE, faulting().build())
    assert finding.where is not None
    assert finding.where.line == 30
    assert finding.saved_s[0] < 0.012 < finding.saved_s[1]
    assert "12.00 ms in the kernel" in finding.because
    assert "MALLOC_TRIM_THRESHOLD_" in finding.edit


def test_kernel_time_that_faults_do_not_explain_does_not_count() -> None:
    few = only_finding(RULE, faulting(faults=500, kernel_s=0.05).build())
    assert few.saved_s[0] < 500 * 4e-6 < few.saved_s[1]


@pytest.mark.parametrize("kernel_s", [0.0, 0.002])
def test_a_small_part_of_a_step_is_not_reported(kernel_s: float) -> None:
    assert diagnose(faulting(kernel_s=kernel_s).build(), [RULE]).findings == ()


def test_a_few_pages_and_systems_without_the_accounting_are_left_alone() -> None:
    assert not list(RULE.check(faulting(faults=50).build()))
    assert not list(RULE.check(EvidenceBuilder().build()))


def test_a_step_that_waits_for_its_device_is_left_alone() -> None:
    assert not list(RULE.check(faulting(device_s=0.099).build()))
