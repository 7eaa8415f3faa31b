from __future__ import annotations

from tests.check.rules.input.uploading import BATCH_BYTES, on_gpu
from tests.evidence_builder import only_finding

from flatout.check.rules.input import pageable_copy
from flatout.check.rules.input.blocking_copy import RULE


def test_waiting_for_a_copy_from_pinned_memory_is_named() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=BATCH_BYTES, seconds=0.006, memory="pinned")
    finding = only_finding(RULE, run.build())
    assert "non_blocking=True" in finding.edit
    assert not list(pageable_copy.RULE.check(run.build()))


def test_a_copy_that_nobody_waits_for_is_left_alone() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=BATCH_BYTES, seconds=0.0001, memory="pinned", mode="async")
    assert not list(RULE.check(run.build()))
