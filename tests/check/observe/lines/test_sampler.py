"""Samples of the running line: what filing one takes is nobody's time."""

from __future__ import annotations

import sys
from time import sleep
from types import FrameType

import pytest

from flatout.check.observe.lines.sampler import Sampler
from flatout.core.runtime.source_sites import Sites


class SlowSites(Sites):
    """Takes long to find a line, and the next signal comes meanwhile."""

    sampler: Sampler

    def of_frame(self, frame: FrameType | None) -> int:
        sleep(0.02)
        self.sampler._sample(sys._getframe())
        return super().of_frame(frame)


def test_time_that_filing_a_sample_takes_is_not_the_lines() -> None:
    sites = SlowSites()
    sampler = sites.sampler = Sampler(sites, phase=lambda: "other")
    sampler.is_on = True

    for _ in range(5):
        sampler._sample(sys._getframe())

    assert sum(sampler.samples.values()) == 5
    assert sum(sampler.seconds.values()) < 0.02
    assert sampler.own_s == pytest.approx(5 * 0.02, rel=0.5)
