"""What holds for every diagnosis: the laws of an honest report, asked of the numbers that the report prints."""

from __future__ import annotations

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis


def assert_lawful(diagnosis: Diagnosis, evidence: Evidence) -> None:
    """Fail where a number contradicts the step that was measured."""
    step_s = diagnosis.step_s
    least_s = 1e-9 * step_s  # of rounding
    assert diagnosis.floor_s is None or diagnosis.floor_s <= step_s + least_s
    for line in diagnosis.hot_lines:
        assert line.floor_s is None or line.floor_s <= line.seconds + least_s, line
    assert sum(f.cost_s for f in diagnosis.findings) <= step_s + least_s
    assert all(f.cost_s <= step_s + least_s for f in diagnosis.findings)
    assert diagnosis.explained_s + diagnosis.unexplained_s <= step_s + least_s
    parts_s = sum(p.seconds for p in diagnosis.parts)
    assert not diagnosis.parts or abs(parts_s + diagnosis.unexplained_s - step_s) <= 1e-6 * step_s
    assert all(p.seconds > 0 and (p.floor_s or 0.0) <= p.seconds + least_s for p in diagnosis.parts)
    for finding in diagnosis.findings:
        low, high = finding.gain
        assert 1 <= low <= high, finding
        left_s = max(step_s - finding.cost_s, evidence.steps.noise_s)
        assert high * left_s <= step_s * (1 + 1e-9), (
            finding,
            "it gains more than goes with the cause, or than can be measured",
        )
