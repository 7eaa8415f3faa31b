"""`flatout.check(step, batches)`: a step function observed in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.core.errors import CaptureError

pytestmark = pytest.mark.slow


def make_step() -> Callable[[Tensor], None]:
    net = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def test_each_call_is_a_step_and_the_result_prints_as_the_report() -> None:
    checked = flatout.check(make_step(), (torch.randn(8, 16) for _ in range(30)))

    assert checked.evidence.steps.kind == "call"
    assert checked.evidence.steps.num_observed == 30
    assert checked.evidence.operators
    assert checked.diagnosis.step_s > 0
    assert "other causes" in str(checked)


def test_no_batches_is_one_clear_error() -> None:
    with pytest.raises(CaptureError, match="gave no batch"):
        flatout.check(make_step(), [])


def test_what_the_step_raises_is_the_callers() -> None:
    def failing(x: Tensor) -> None:
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        flatout.check(failing, [torch.randn(2)])
    assert torch.nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"
