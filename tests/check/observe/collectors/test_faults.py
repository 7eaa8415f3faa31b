"""The kernel's count of page faults for the thread that runs the steps."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

from flatout.check.capture import Capture
from flatout.check.observe.collectors.faults import usage
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.memory import FreshPages

PAGES = 512


def pages_of(touched: int) -> FreshPages:
    """What a loop counts whose every step maps and touches so many fresh pages."""
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    capture.start()
    try:
        for _ in range(40):
            if touched:
                with mmap.mmap(-1, touched * mmap.PAGESIZE) as memory:
                    memory.madvise(mmap.MADV_NOHUGEPAGE)
                    for page in range(touched):
                        memory[page * mmap.PAGESIZE] = 1
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert evidence.fresh_pages is not None
    return evidence.fresh_pages


@pytest.mark.skipif(usage() is None, reason="this system counts no page faults for a thread")
def test_pages_touched_anew_in_each_step_are_counted() -> None:
    quiet, busy = pages_of(0), pages_of(PAGES)
    assert busy.faults - quiet.faults == pytest.approx(PAGES, rel=0.2)
    assert busy.num_steps > 0
    assert busy.kernel_s >= 0
