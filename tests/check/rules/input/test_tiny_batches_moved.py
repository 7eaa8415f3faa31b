from __future__ import annotations

import pytest
from tests.check.rules.input.uploading import on_gpu
from tests.evidence_builder import only_finding

from flatout.check.rules.input.tiny_batches_moved import RULE


def test_many_small_copies_from_one_line_are_named() -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=2_000, calls=64, seconds=0.02)
    finding = only_finding(RULE, run.build())
    assert finding.saved_s[1] == pytest.approx(0.02 * 63 / 64, rel=0.01)


@pytest.mark.parametrize(("calls", "num_bytes"), [(4, 2_000), (64, 4_000_000)])
def test_few_or_large_copies_are_left_alone(calls: int, num_bytes: int) -> None:
    run, line = on_gpu()
    run.upload(line, num_bytes=num_bytes, calls=calls, seconds=0.02)
    assert not list(RULE.check(run.build()))
