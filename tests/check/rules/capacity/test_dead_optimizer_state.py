from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import MIB, remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.dead_optimizer_state import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact


def frozen(num_bytes: int) -> Evidence:
    run = EvidenceBuilder()
    run.optimizer(constructed=run.line("train.py", 9, "optimizer = Adam(net.parameters())"))
    fact = ModuleFact(name="dead-optimizer-state", module="Net.body.0", kind="Linear", value=float(num_bytes))
    return remembering(run, facts=(fact,))


def test_dead_state_is_told_with_its_bytes_at_the_optimizer() -> None:
    finding = only_finding(RULE, frozen(300 * MIB))

    assert finding.saved_bytes == 300 * MIB
    assert "Net.body.0" in finding.because
    assert finding.where is not None
    assert finding.where.line == 9


def test_a_little_of_it_is_not_reported() -> None:
    assert diagnose(frozen(10 * MIB), [RULE]).findings == ()
    assert diagnose(frozen(300 * MIB), [RULE]).findings != ()


def test_trained_parameters_alone_are_silent() -> None:
    assert not list(RULE.check(remembering(EvidenceBuilder())))
