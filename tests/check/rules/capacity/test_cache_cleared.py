from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.cache_cleared import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import CallUse


def clearing(*, name: str = "gc.collect", calls: float = 1.0, seconds: float = 0.03) -> Evidence:
    run = EvidenceBuilder()
    use = CallUse(name=name, source=run.line("train.py", 50, f"{name}()"), calls=calls, seconds=seconds)
    return remembering(run, uses=(use,))


def test_collecting_in_every_step_costs_its_time() -> None:
    finding = only_finding(RULE, clearing())

    assert finding.cost_s == 0.03
    assert finding.where is not None
    assert finding.where.line == 50
    assert "in every step" in finding.because


def test_now_and_then_is_below_what_is_reported() -> None:
    assert diagnose(clearing(calls=0.01, seconds=0.0003), [RULE]).findings == ()


def test_other_calls_are_not_its_business() -> None:
    assert not list(RULE.check(clearing(name="torch.save")))
