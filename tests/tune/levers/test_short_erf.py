"""GELU by a short formula in compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.tune.levers.short_erf import ShortGelu, short_gelu_in_graphs


def results(function: object, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, x, gradient)]


def test_it_is_as_exact_as_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-12, 12, 20001), 3 * torch.randn(20000, generator=generator)])
    gradient = torch.randn(x.shape, generator=generator)
    exact = results(F.gelu, x.double(), gradient.double())
    for found, torchs, wanted in zip(
        results(ShortGelu.apply, x, gradient), results(F.gelu, x, gradient), exact, strict=True
    ):
        off, own = ((t.double() - wanted).abs().max().item() for t in (found, torchs))
        assert off < max(2 * own, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_rounds_the_exact_numbers(dtype: torch.dtype) -> None:
    x, gradient = (3 * torch.randn(2, 50000, generator=torch.Generator().manual_seed(1))).to(dtype)
    exact = results(F.gelu, x.double(), gradient.double())
    for found, wanted in zip(results(ShortGelu.apply, x, gradient), exact, strict=True):
        assert found.dtype == dtype
        is_large = wanted.abs() > 1e-2  # smaller ones come out of a difference in torch's formula, too
        assert (found == wanted.to(dtype))[is_large].float().mean() > 0.99
        assert (found.double() - wanted).norm() < 1.01 * (wanted.to(dtype).double() - wanted).norm()


def test_ends_and_not_a_number_stay_what_they_are() -> None:
    x = torch.tensor([0.0, -0.0, 40.0, -40.0, float("inf"), float("nan")])
    found = ShortGelu.apply(x)  # type: ignore[no-untyped-call]
    assert found[:4].tolist() == [0.0, 0.0, 40.0, 0.0]
    assert found[4] == float("inf")
    assert found[5].isnan()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
def test_only_graphs_for_the_device_in_16_bits_have_it() -> None:
    original, calls = F.gelu, []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        calls.append(graph.print_readable(print_output=False))
        return graph.forward

    torch._dynamo.reset()
    undo = short_gelu_in_graphs("cpu")
    try:
        compiled = torch.compile(nn.GELU(), backend=backend)
        half, single = torch.randn(2, 8).to(torch.bfloat16), torch.randn(2, 8)
        torch.testing.assert_close(compiled(half), original(half), rtol=2e-2, atol=1e-6)
        torch.testing.assert_close(compiled(single), original(single))
        assert torch.equal(nn.GELU()(half), original(half))  # not compiled
        assert ["nn.gelu" in text.partition("def forward")[2] for text in calls] == [False, True]
        tanh = torch.compile(nn.GELU(approximate="tanh"), backend=backend)
        torch.testing.assert_close(tanh(half), original(half, approximate="tanh"))
    finally:
        undo()
    assert F.gelu is original


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_compiled_gradients_are_those_of_float64() -> None:
    undo = short_gelu_in_graphs()
    try:
        torch._dynamo.reset()
        x, gradient = 3 * torch.randn(2, 64, 256, device="cuda")
        exact = results(F.gelu, x.bfloat16().double(), gradient.bfloat16().double())
        found = results(torch.compile(nn.GELU()), x.bfloat16(), gradient.bfloat16())
    finally:
        undo()
    for one, wanted in zip(found, exact, strict=True):
        assert ((one.double() - wanted).norm() / wanted.norm()).item() < 3e-3


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_as_exact_and_only_the_input_is_saved(dtype: torch.dtype) -> None:
    undo = short_gelu_in_graphs("cpu")
    try:
        torch._dynamo.reset()
        x, gradient = (3 * torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(2))).to(dtype)
        x.requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = torch.compile(lambda x: F.gelu(x * 2.0))(x)
        found = [y.detach(), *torch.autograd.grad(y, x, gradient)]
        assert [(t.dtype, t.shape) for t in saved] == [(dtype, x.shape)]
        exact = results(lambda x: F.gelu(x * 2.0), x.double(), gradient.double())
    finally:
        undo()
    for one, wanted in zip(found, exact, strict=True):
        assert ((one.double() - wanted).norm() / wanted.norm()).item() < (3e-3 if dtype == torch.bfloat16 else 4e-4)
