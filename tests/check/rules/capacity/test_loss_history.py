from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.capacity.loss_history import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Growth


def grown(*, num_bytes: int = 1 << 20, slope: float = 0.0, has_graph: bool = True, holder: bool = True) -> Evidence:
    run = EvidenceBuilder()
    made = run.line("train.py", 20, "loss = F.mse_loss(net(x), y)")
    held = run.line("train.py", 24, "losses.append(loss)") if holder else -1
    growth = Growth(
        source=made,
        holder=held,
        container="list 'losses' of main()" if holder else "",
        bytes_per_step=num_bytes,
        tensors_per_step=1.0,
        has_graph=has_graph,
    )
    return remembering(run, growth=(growth,), slope=slope)


def test_a_history_with_graphs_is_named_by_the_line_that_keeps_it() -> None:
    finding = only_finding(RULE, grown())

    assert finding.where is not None
    assert finding.where.line == 24
    assert finding.growth_bytes_per_step == 1 << 20
    assert "losses" in finding.because


def test_without_a_holder_the_line_that_made_the_tensors_is_named() -> None:
    finding = only_finding(RULE, grown(holder=False))

    assert finding.where is not None
    assert finding.where.line == 20


def test_the_measured_slope_counts_where_it_is_larger() -> None:
    assert only_finding(RULE, grown(num_bytes=1000, slope=5000.0)).growth_bytes_per_step == 5000


def test_it_leads_the_report_with_the_steps_until_memory_is_full() -> None:
    [finding] = diagnose(grown(), [RULE]).findings

    assert finding.steps_until_full == 15 * 1024
    assert not finding.saves_time


def test_growth_that_takes_longer_than_a_day_is_a_note() -> None:
    diagnosis = diagnose(grown(num_bytes=1000), [RULE])

    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [24]


def test_tensors_without_graphs_are_left_to_another_rule() -> None:
    assert not list(RULE.check(grown(has_graph=False)))
