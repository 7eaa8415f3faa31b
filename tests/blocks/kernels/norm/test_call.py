from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.blocks.kernels.against_float64 import on_device
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.norm.call import layer_norm, rms_norm
from flatout.blocks.kernels.selection import select_kernel
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_KERNELS = [*kernels("norm.rms_norm"), *kernels("norm.layer_norm")]


def _x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_both_are_pytorchs() -> None:
    x, weight, bias = _x(3, 4, 10), _x(10, seed=1), _x(10, seed=2)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-3), F.rms_norm(x, (10,), weight, 1e-3))
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (10,), weight, bias))


def test_with_a_residual_the_sum_is_normed_and_returned() -> None:
    x, weight, passing = _x(3, 10), _x(10, seed=1), _x(3, 10, seed=2)
    for norm in (rms_norm, layer_norm):
        normed, summed = norm(x, weight, residual=passing)  # type: ignore[operator]
        torch.testing.assert_close(summed, x + passing)
        torch.testing.assert_close(normed, norm(x + passing, weight))  # type: ignore[operator]


@pytest.mark.parametrize("kernel", _KERNELS, ids=lambda k: k.id)
def test_the_sum_alone_can_be_what_learns(kernel: Kernel) -> None:
    x, weight, passing = _x(3, 10), _x(10, seed=1), _x(3, 10, seed=2)
    with interpreted() if kernel.id.endswith("triton") else nullcontext():
        _, summed = kernel.run(x, weight, residual=passing)
        gradients = torch.autograd.grad(summed.sum(), [x, passing, weight], allow_unused=True)
    assert torch.equal(gradients[0], torch.ones(3, 10)) and torch.equal(gradients[1], torch.ones(3, 10))
    assert gradients[2] is None or not gradients[2].any()


@pytest.mark.parametrize("kernel", [k for k in _KERNELS if k.id.endswith(("triton", "blocked"))], ids=lambda k: k.id)
def test_a_second_derivative_is_refused_and_not_taken_for_zero(kernel: Kernel) -> None:
    x = _x(3, 10)
    with interpreted() if kernel.id.endswith("triton") else nullcontext():
        [gradient] = torch.autograd.grad(kernel.run(x).square().sum(), x, create_graph=True)
        with pytest.raises(UsageError, match="differentiated again"):
            gradient.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _KERNELS, ids=lambda k: k.id)
def test_compiles_whole(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.blocks.kernels.selection.kernel_for", lambda *_, **__: kernel)
    norm: Any = rms_norm if kernel.op.endswith("rms_norm") else layer_norm
    x, weight, passing = _x(6, 10), _x(10, seed=1), _x(6, 10, seed=2)

    def step(x: Tensor, weight: Tensor, passing: Tensor) -> Tensor:
        normed, summed = norm(x.tanh(), weight, residual=passing)
        result: Tensor = (norm(normed, weight).sin() + summed.cos()).sum()
        return result

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x, weight, passing]
    with interpreted() if kernel.id.endswith("triton") else nullcontext():
        for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (step, compiled)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.ones(2, 3, dtype=torch.long),), "floating-point"),
        ((torch.ones(2, 3), torch.ones(2)), "weight (2,) is not one number for each of the 3"),
        ((torch.ones(2, 3), None, torch.ones(3)), "residual (3,)"),
    ],
)
def test_what_does_not_fit_is_said(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        rms_norm(*arguments)
    assert says in str(raised.value)


def test_a_kernel_named_that_refuses_is_said() -> None:
    with pytest.raises(UsageError, match=r"norm.layer_norm.triton.*GPU"):
        layer_norm(torch.ones(2, 3), kernel="norm.layer_norm.triton")


def test_weights_of_another_dtype_keep_the_dtype_of_x() -> None:
    x, weight = torch.randn(3, 10).bfloat16(), torch.randn(10)
    assert select_kernel("norm.layer_norm", x, weight).kernel.id == "norm.layer_norm.reference"
    assert layer_norm(x, weight).dtype == rms_norm(x, weight).dtype == torch.bfloat16


@on_device
@pytest.mark.device
def test_weight_gradients_have_the_same_bits_every_time() -> None:
    x, weight = torch.randn(3000, 1000, device="cuda").bfloat16(), torch.randn(1000, device="cuda").requires_grad_()
    grads = [torch.autograd.grad(rms_norm(x, weight).float().square().sum(), weight)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert select_kernel("norm.rms_norm", x, weight).kernel.id == "norm.rms_norm.triton"
