from __future__ import annotations

import pytest
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.sync_call import RULE
from flatout.core.records.device import Copy, HostWait


def wait(source: int, seconds: float, call: str = "cudaDeviceSynchronize") -> HostWait:
    return HostWait(source=source, call=call, num=1, seconds=seconds)


def test_a_synchronisation_of_each_step_is_named_and_priced_by_idle_time() -> None:
    run = EvidenceBuilder(device_s=0.07)
    finding = only_finding(
        RULE, with_device(run, waits=[wait(run.line("train.py", 40, "torch.cuda.synchronize()"), 0.06)])
    )
    assert finding.where is not None
    assert finding.where.line == 40
    assert (finding.cost_s, finding.saved_s[1]) == (pytest.approx(0.06), pytest.approx(0.03))


def test_two_lines_share_the_idle_time() -> None:
    run = EvidenceBuilder(device_s=0.06)
    waits = [wait(run.line("train.py", 40), 0.06), wait(run.line("train.py", 50), 0.06)]
    assert sum(f.saved_s[1] for f in RULE.check(with_device(run, waits=waits))) <= 0.04 + 1e-12


def test_on_a_device_that_is_busy_anyway_it_is_a_note() -> None:
    run = EvidenceBuilder(device_s=0.099)
    diagnosis = diagnose(with_device(run, waits=[wait(run.line("train.py", 40), 0.06)]), [RULE])
    assert diagnosis.findings == ()
    assert [n.where.line for n in diagnosis.notes if n.where] == [40]


def test_the_wait_inside_a_read_belongs_to_the_read() -> None:
    run = EvidenceBuilder(device_s=0.05)
    line = run.line("train.py", 29, "total += loss.item()")
    run.host_read(line, wait_s=0.04, on_device=True)
    assert list(RULE.check(with_device(run, waits=[wait(line, 0.04, "cudaStreamSynchronize")]))) == []


def test_the_wait_of_a_blocking_copy_belongs_to_the_copy() -> None:
    run = EvidenceBuilder(device_s=0.05)
    line = run.line("train.py", 20, "x = x.to(device)")
    copy = Copy(
        source=line, direction="host-to-device", memory="pageable", is_async=False,
        num=1, bytes=1000, seconds=0.01, overlapped_s=0.0, host_s=0.04,
    )  # fmt: skip
    evidence = with_device(run, waits=[wait(line, 0.04, "cudaStreamSynchronize")], copies=[copy])
    assert list(RULE.check(evidence)) == []


def test_the_wait_inside_an_operator_is_nobodys_explicit_call() -> None:
    run = EvidenceBuilder(device_s=0.05)
    inside = HostWait(
        source=run.line("train.py", 33, "scaler.step(optimizer)"),
        call="cudaStreamSynchronize",
        num=1,
        seconds=0.04,
        op="aten._local_scalar_dense",
    )
    assert list(RULE.check(with_device(run, waits=[inside]))) == []


def test_without_lines_only_a_device_wide_wait_is_surely_explicit() -> None:
    run = EvidenceBuilder(device_s=0.05)
    calls = ("cudaDeviceSynchronize", "cudaStreamSynchronize")
    assert len(list(RULE.check(with_device(run, waits=[wait(-1, 0.04, call) for call in calls])))) == 1
