from __future__ import annotations

import msgspec
import pytest
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.bandwidth.copy_not_overlapped import RULE
from flatout.core.records.device import Copy

COPY = Copy(
    source=0, direction="host-to-device", memory="pinned", is_async=True,
    num=2, bytes=10**9, seconds=0.02, overlapped_s=0.0, host_s=0.0001,
)  # fmt: skip


def test_pinned_copies_that_nothing_runs_beside_are_named() -> None:
    run = EvidenceBuilder(device_s=0.098)
    run.line("train.py", 20, "x = x.to(device, non_blocking=True)")
    finding = only_finding(RULE, with_device(run, copies=[COPY]))
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (20, pytest.approx(0.02))


@pytest.mark.parametrize(
    "change",
    [{"overlapped_s": 0.02}, {"memory": "pageable"}, {"is_async": False}, {"direction": "device-to-device"}],
    ids=str,
)
def test_near_misses_are_left_alone(change: dict[str, object]) -> None:
    run = EvidenceBuilder(device_s=0.098)
    run.line("train.py", 20)
    assert list(RULE.check(with_device(run, copies=[msgspec.structs.replace(COPY, **change)]))) == []


def test_on_a_device_that_waits_for_the_host_it_gains_nothing() -> None:
    run = EvidenceBuilder(device_s=0.05)
    run.line("train.py", 20)
    assert list(RULE.check(with_device(run, copies=[COPY]))) == []
