from __future__ import annotations

import pytest
from tests.check.rules.device_steps import with_device
from tests.check.rules.input.uploading import on_gpu
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.copy_waits import RULE
from flatout.core.records.device import Copy, Gap

SMALL = 2048


def waiting(*, device_s: float = 0.06, seconds: float = 0.03) -> EvidenceBuilder:
    """A step of 100 ms whose host waits at the small copy of line 20 of train.py."""
    run, line = on_gpu(device_s=device_s)
    run.upload(line, num_bytes=SMALL, seconds=seconds)
    return run


def test_a_wait_at_a_small_copy_is_named() -> None:
    finding = only_finding(RULE, waiting().build())
    assert finding.where is not None and finding.where.line == 20
    assert finding.saved_s[1] == pytest.approx(0.03, rel=1e-3)
    assert finding.levers == ("communication.non-blocking-copies",)


def test_all_lines_are_one_finding_at_the_one_that_waits_longest() -> None:
    run = waiting(seconds=0.001)
    run.upload(run.line("train.py", 21, "y = y.to(device)"), num_bytes=SMALL, seconds=0.02)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None and finding.where.line == 21
    assert [source.line for source in finding.also] == [20]
    assert finding.cost_s == pytest.approx(0.021, rel=1e-3)


def test_no_more_is_saved_than_the_device_idles() -> None:
    assert only_finding(RULE, waiting(device_s=0.08).build()).saved_s[1] == pytest.approx(0.02)
    assert not list(RULE.check(waiting(device_s=0.0998).build())), "a device that is busy all the time loses nothing"


def test_gaps_between_kernels_that_were_queued_in_time_are_not_its_business() -> None:
    run = EvidenceBuilder(device_s=0.06)
    line = run.line("train.py", 20, "x = x.to(device)")
    copy = Copy(
        source=line,
        direction="host-to-device",
        memory="pageable",
        is_async=False,
        num=1,
        bytes=SMALL,
        seconds=1e-6,
        overlapped_s=0.0,
        host_s=0.03,
    )
    gaps = [Gap(source=line, num=9, seconds=s, cause=c) for s, c in ((0.03, "unknown"), (0.008, "host-wait"))]  # type: ignore[arg-type]
    finding = only_finding(RULE, with_device(run, gaps=gaps, copies=[copy]))
    assert finding.saved_s[1] == pytest.approx(0.008)


def test_reads_that_are_left_have_their_part_of_the_idle_time() -> None:
    run = waiting(device_s=0.08)
    run.host_read(run.line("train.py", 30), wait_s=0.02, on_device=True)
    assert only_finding(RULE, run.build()).saved_s[1] == pytest.approx(0.01)


def test_large_copies_and_copies_that_nobody_waits_for_belong_to_others() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=200 << 20, seconds=0.03)
    run.upload(run.line("train.py", 21), num_bytes=SMALL, seconds=0.03, mode="async")
    assert not list(RULE.check(run.build()))


def test_a_run_on_a_cpu_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.upload(run.line("train.py", 20), num_bytes=SMALL, seconds=0.03)
    assert not list(RULE.check(run.build()))
