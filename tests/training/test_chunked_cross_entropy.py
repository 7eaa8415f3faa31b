from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.training.chunked_cross_entropy import chunked_cross_entropy


def _inputs(dtype: torch.dtype, *, has_bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 21, 16, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(97, 16, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(97, dtype=torch.float64).to(dtype).requires_grad_() if has_bias else None
    targets = torch.randint(97, (3, 21))
    targets[0, :5] = -100
    return hidden, weight, targets, bias


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), targets.flatten())


def _error(got: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True))


def _results(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    (3 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 8, 21, 1000])
@pytest.mark.parametrize("has_bias", [True, False])
def test_loss_and_gradients_are_no_worse_than_of_whole_logits(dtype: torch.dtype, chunk: int, has_bias: bool) -> None:
    one, two = _inputs(dtype, has_bias=has_bias), _inputs(dtype, has_bias=has_bias)
    exact_inputs = tuple(
        t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in one
    )
    exact = _results(_reference(*exact_inputs), exact_inputs[0], exact_inputs[1], exact_inputs[3])  # type: ignore[arg-type]
    usual = _results(_reference(*one), one[0], one[1], one[3])
    chunked = _results(chunked_cross_entropy(*two, chunk=chunk), two[0], two[1], two[3])
    assert len(chunked) == len(exact)
    assert _error(chunked, exact) <= 2 * _error(usual, exact) + 1e-13


def test_another_ignored_class_and_a_frozen_head() -> None:
    hidden, weight, targets, _ = _inputs(torch.float64, has_bias=False)
    targets = targets.where(targets >= 0, 3)
    frozen = weight.detach()
    loss = chunked_cross_entropy(hidden, frozen, targets, ignore_index=3, chunk=10)
    [gradient] = torch.autograd.grad(loss, [hidden])
    expected = F.cross_entropy(F.linear(hidden, frozen).flatten(0, 1), targets.flatten(), ignore_index=3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, [hidden])[0])


def test_no_target_at_all_is_as_undefined_as_before() -> None:
    hidden, weight, targets, bias = _inputs(torch.float32)
    assert chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), bias).isnan()


def test_autocast_decides_the_precision_of_the_products() -> None:
    one, two = _inputs(torch.float32), _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        usual, chunked = _reference(*one), chunked_cross_entropy(*two, chunk=8)
    torch.testing.assert_close(chunked, usual, rtol=1e-5, atol=1e-5)
    for a, b in zip(_results(chunked, two[0], two[1]), _results(usual, one[0], one[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
