from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout.check.capture import Capture
from flatout.check.observe.memory.device import AllocatorBlock, peak_of_history
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.memory import Memory


def event(action: str, address: int, size: int, at_s: float) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": (at_s + 1000.0) * 1e6}


def test_peak_of_the_allocators_history() -> None:
    history = [
        event("free_requested", 100, 10, 1.0),  # held before the step
        event("free_completed", 100, 10, 1.0),
        event("alloc", 200, 50, 2.0),
        event("alloc", 300, 5, 3.0),
        event("free_requested", 300, 5, 4.0),
        event("free_completed", 300, 5, 4.0),
        event("alloc", 100, 20, 5.0),  # the peak: 40 - 10 + 50 + 20
        event("free_requested", 200, 50, 6.0),
        event("free_completed", 200, 50, 6.0),
        event("alloc", 400, 30, 7.0),
    ]
    peak = peak_of_history(40, history, offset_s=1000.0)
    assert peak.bytes == 100
    assert peak.at_s == pytest.approx(5.0, abs=1e-5)
    assert peak.freed == {100: 10}
    assert peak.blocks is not None
    live = [AllocatorBlock(b.address, b.bytes, round(b.start_s, 4), round(b.end_s, 4)) for b in peak.blocks]
    assert live == [AllocatorBlock(200, 50, 2.0, 6.0), AllocatorBlock(100, 20, 5.0)]


def test_peak_of_a_step_that_allocates_nothing_is_its_beginning() -> None:
    peak = peak_of_history(40, [], offset_s=0.0)
    assert (peak.bytes, peak.begin_bytes, peak.blocks, peak.freed) == (40, 40, (), {})


def observed(net: nn.Module, batch: torch.Tensor) -> Memory:
    schedule = Schedule(num_warm_up=2, num_light_before=1, num_light_on_device=1, num_deep=0, trials_budget_s=0.0)
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    optimizer = torch.optim.Adam(net.parameters())
    capture.start()
    for _ in range(12):
        optimizer.zero_grad()
        out = net(batch)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        optimizer.step()
    evidence = capture.finish(exit="finished", exit_code=0)
    return next(m for m in evidence.memory if m.device.startswith("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["linear", "lstm"])
def test_parts_at_a_devices_peak_add_up_to_what_the_allocator_reports(kind: str) -> None:
    net = nn.Linear(512, 4096) if kind == "linear" else nn.LSTM(64, 256, num_layers=2)
    batch = torch.randn(4096, 512) if kind == "linear" else torch.randn(64, 128, 64)
    memory = observed(net.cuda(), batch.cuda())
    assert memory.measured_peak_bytes is not None
    assert memory.peak_bytes == pytest.approx(memory.measured_peak_bytes, rel=0.05)
    known = [p for p in memory.at_peak if p.kind in ("activations", "temporaries") and p.num_tensors]
    assert known
