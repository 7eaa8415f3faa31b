from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.blocks.kernels.against_float64 import name_of
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.swiglu.call import swiglu
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_KERNELS = kernels("swiglu")


def test_packed_is_as_its_halves() -> None:
    torch.manual_seed(0)
    packed = torch.randn(3, 20).requires_grad_()
    gate, up = packed.chunk(2, dim=-1)
    assert torch.equal(swiglu(packed), swiglu(gate, up))
    torch.testing.assert_close(swiglu(packed), F.silu(gate) * up)
    gradients = [torch.autograd.grad(made.square().sum(), packed)[0] for made in (swiglu(packed), swiglu(gate, up))]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kernel", [k for k in _KERNELS if not k.id.endswith("reference")], ids=name_of)
def test_nothing_but_the_inputs_is_kept(kernel: Kernel) -> None:
    gate, up = torch.randn(4, 10).requires_grad_(), torch.randn(4, 10).requires_grad_()
    kept: list[Tensor] = []
    with (
        interpreted() if kernel.id.endswith("triton") else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        kernel.run(gate, up)
    assert {t.data_ptr() for t in kept} <= {gate.data_ptr(), up.data_ptr()}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _KERNELS, ids=name_of)
def test_compiles_whole(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.blocks.kernels.selection.kernel_for", lambda *_, **__: kernel)
    x = torch.randn(5, 20).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return swiglu(x.sin()).square().sum() + swiglu(*x.chunk(2, dim=-1)).sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with interpreted() if kernel.id.endswith("triton") else nullcontext():
        for a, b in zip(*(torch.autograd.grad(f(x), x) for f in (step, compiled)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("gate", "up", "says"),
    [
        (torch.ones(3, dtype=torch.long), None, "floating-point"),
        (torch.ones(2, 3), None, "has no halves"),
        (torch.ones(2, 4), torch.ones(2, 3), "not like gate"),
        (torch.ones(2, 4), torch.ones(2, 4).double(), "not like gate"),
    ],
)
def test_what_does_not_fit_is_said(gate: Tensor, up: Tensor | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        swiglu(gate, up)
