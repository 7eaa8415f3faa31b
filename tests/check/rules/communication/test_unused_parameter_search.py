from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.unused_parameter_search import RULE


def searching(*, find: bool = True, has_unused: bool | None = False, search_s: float = 0.01) -> EvidenceBuilder:
    run = EvidenceBuilder()
    run.replication(
        run.line("train.py", 9, "DistributedDataParallel(net, find_unused_parameters=True)"),
        find_unused_parameters=find,
        has_unused_parameters=has_unused,
        search_s=search_s,
    )
    return run


def test_a_search_in_vain_is_named_with_its_measured_time() -> None:
    finding = only_finding(RULE, searching().build())
    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (9, "timed")
    assert finding.saved_s[1] == pytest.approx(0.01)


def test_a_cheap_search_is_only_a_note() -> None:
    diagnosis = diagnose(searching(search_s=0.0001).build(), [RULE])
    assert diagnosis.findings == ()
    assert len(diagnosis.notes) == 1


@pytest.mark.parametrize("how", [{"find": False}, {"has_unused": True}, {"has_unused": None}], ids=str)
def test_a_search_that_is_needed_or_not_known_is_left_alone(how: dict[str, bool | None]) -> None:
    diagnosis = diagnose(searching(**how).build(), [RULE])  # type: ignore[arg-type]
    assert (diagnosis.findings, diagnosis.notes) == ((), ())
