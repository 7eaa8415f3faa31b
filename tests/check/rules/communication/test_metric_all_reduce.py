from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.metric_all_reduce import RULE


def logging(**how: object) -> EvidenceBuilder:
    """`dist.all_reduce(loss)` on line 30, 10 ms of a step of 100 ms."""
    run = EvidenceBuilder()
    run.collective(run.line("train.py", 30, "dist.all_reduce(loss)"), **how)  # type: ignore[arg-type]
    return run


def test_a_number_reduced_in_every_step_is_named() -> None:
    finding = only_finding(RULE, logging(exposed_s=0.01).build())
    assert finding.where is not None
    assert finding.where.line == 30
    assert finding.saved_s[1] == pytest.approx(0.0098)


def test_what_waits_for_the_slower_rank_is_not_saved() -> None:
    diagnosis = diagnose(logging(exposed_s=0.01, wait_s=0.009).build(), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [30]


@pytest.mark.parametrize(
    "how",
    [
        {"num": 0.02},
        {"bytes": 1 << 20},
        {"phase": "backward"},
        {"caller": "torch.nn.modules._functions"},
        {"op": "barrier"},
        {"num": 24.0, "bytes": 96},
    ],
    ids=["now and then", "gradients", "backward", "sync batchnorm", "barrier", "tensors one by one"],
)
def test_other_collectives_are_left_alone(how: dict[str, object]) -> None:
    diagnosis = diagnose(logging(**how).build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())


def test_a_single_process_has_none() -> None:
    assert list(RULE.check(EvidenceBuilder().build())) == []
