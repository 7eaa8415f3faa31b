"""What FlexAttention is compiled with, on a CPU with another function: FlexAttention itself has no backward pass there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.blocks.kernels.attention.flex import _inductor

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own, when it is imported
def test_a_second_backward_pass_need_not_be_announced_at_the_first() -> None:
    def wave(x: Tensor) -> Tensor:
        return (x.sin() * x.exp()).tanh() * x.cos().exp()

    compiled = torch.compile(wave, fullgraph=True, backend=_inductor)
    x = torch.randn(64, 64, requires_grad=True)
    (once,) = torch.autograd.grad(compiled(x).sum(), x)
    out = compiled(x).sum()
    (kept,) = torch.autograd.grad(out, x, retain_graph=True)
    (again,) = torch.autograd.grad(out, x)
    assert torch.equal(kept, once)
    assert torch.equal(again, once)
