from __future__ import annotations

import pytest
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.device_idle import RULE
from flatout.core.records.device import Gap, HostWait
from flatout.core.records.trial import TimeModel


def late(source: int, seconds: float) -> Gap:
    return Gap(source=source, num=100, seconds=seconds, cause="late-launch")


def test_the_line_before_whose_work_the_device_idles_longest_is_named() -> None:
    run = EvidenceBuilder(device_s=0.04)
    slow, other = run.line("model.py", 12, "h = self.cell(x[t], h)"), run.line("model.py", 20)
    finding = only_finding(RULE, with_device(run, gaps=[late(slow, 0.04), late(other, 0.02)]))
    assert finding.where is not None
    assert finding.where.line == 12
    assert [s.line for s in finding.also] == [20]
    assert finding.cost_s == pytest.approx(0.06)


def test_gaps_of_a_profiled_step_are_scaled_to_the_idle_time_of_honest_ones() -> None:
    run = EvidenceBuilder(device_s=0.09)
    finding = only_finding(RULE, with_device(run, gaps=[late(run.line("a.py", 1), 0.05)]))
    assert finding.cost_s == pytest.approx(0.01)


def test_gaps_for_other_reasons_are_not_its_business() -> None:
    run = EvidenceBuilder(device_s=0.04)
    line = run.line("a.py", 1)
    gaps = [Gap(source=line, num=3, seconds=0.02, cause=c) for c in ("host-wait", "data", "unknown")]  # type: ignore[arg-type]
    assert list(RULE.check(with_device(run, gaps=gaps))) == []


def test_what_follows_a_wait_of_the_host_is_explained_by_the_wait() -> None:
    run = EvidenceBuilder(device_s=0.06)
    run.host_read(run.line("a.py", 2), wait_s=0.05, on_device=True)
    assert list(RULE.check(with_device(run, gaps=[late(run.line("a.py", 1), 0.03)]))) == []


def test_an_explicit_wait_explains_as_well() -> None:
    run = EvidenceBuilder(device_s=0.06)
    wait = HostWait(source=0, call="cudaDeviceSynchronize", num=1, seconds=0.05)
    assert list(RULE.check(with_device(run, gaps=[late(run.line("a.py", 1), 0.03)], waits=[wait]))) == []


def test_a_busy_device_is_left_alone() -> None:
    run = EvidenceBuilder(device_s=0.098)
    assert diagnose(with_device(run, gaps=[late(run.line("a.py", 1), 0.002)]), [RULE]).findings == ()


def test_it_is_silent_where_a_larger_batch_was_found_to_help() -> None:
    run = EvidenceBuilder(device_s=0.04)
    run.tried(TimeModel(model=0, variant="batched", backward=True, factor=2), kept=0.5)
    assert list(RULE.check(with_device(run, gaps=[late(run.line("a.py", 1), 0.05)]))) == []


def test_in_a_trace_made_elsewhere_the_profilers_cost_is_allowed_for() -> None:
    run = EvidenceBuilder(device_s=0.04)
    gaps = [late(run.line("a.py", 1), 0.05)]
    live, imported = (only_finding(RULE, with_device(run, gaps=gaps, slowdown=s)) for s in (1.1, None))
    assert imported.saved_s[0] < live.saved_s[0]
    assert "profiler" in imported.because


def test_without_a_device_there_is_nothing_to_say() -> None:
    assert list(RULE.check(EvidenceBuilder().build())) == []
