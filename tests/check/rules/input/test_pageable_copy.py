from __future__ import annotations

import msgspec
import pytest
from tests.check.rules.input.uploading import BATCH_BYTES, on_gpu
from tests.evidence_builder import only_finding

from flatout.check.rules.input import blocking_copy
from flatout.check.rules.input.pageable_copy import RULE
from flatout.core.records.device import Copy, DeviceStep
from flatout.core.records.evidence import Evidence


def test_a_large_batch_from_pageable_memory_is_priced_by_the_measured_rates() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=BATCH_BYTES, seconds=0.025)
    finding = only_finding(RULE, run.build())
    assert finding.saved_s[0] == pytest.approx(0.025 - BATCH_BYTES / 50e9)
    assert not list(blocking_copy.RULE.check(run.build()))


def test_a_small_copy_from_pageable_memory_is_left_alone() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=4_000, seconds=0.005)
    assert not list(RULE.check(run.build()))


def test_the_devices_own_clock_comes_before_the_hosts() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=BATCH_BYTES, seconds=0.09)
    copy = Copy(
        source=line,
        direction="host-to-device",
        memory="pageable",
        is_async=False,
        num=1,
        bytes=BATCH_BYTES,
        seconds=0.025,
        overlapped_s=0.0,
        host_s=0.024,
    )
    step = DeviceStep(name="GPU", span_s=0.1, busy_s=0.06, copies=(copy,))
    evidence: Evidence = msgspec.structs.replace(run.build(), device_step=step)
    assert only_finding(RULE, evidence).cost_s == pytest.approx(0.025)
