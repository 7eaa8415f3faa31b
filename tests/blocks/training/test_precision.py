from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training.precision import Kind, Precision, _float32_sums
from flatout.core.errors import UsageError


def _trained(kind: Kind, *, max_norm: float | None = None, steps: int = 5) -> tuple[nn.Module, list[Tensor | None]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    precision, norms = Precision(kind), []
    x = torch.randn(128, 32)
    for _ in range(steps):
        with precision:
            out = net(x)
            assert out.dtype is precision.dtype
            loss = (out.float() - x[:, :1]).square().mean()
        optimizer.zero_grad()
        precision.backward(loss)
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())
        norms.append(precision.update(optimizer, max_norm=max_norm))
    return net, norms


def test_float32_is_the_plain_loop_bit_for_bit() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    x = torch.randn(128, 32)
    for _ in range(5):
        loss = (net(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found, _ = _trained("float32")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), found.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_sixteen_bits_come_near_it(kind: Kind) -> None:
    exact, _ = _trained("float32")
    found, _ = _trained(kind)
    for a, b in zip(exact.parameters(), found.parameters(), strict=True):
        assert (a - b).abs().max() < 0.05


def test_the_norm_is_that_before_clipping_and_unscaled() -> None:
    _, exact = _trained("float32", max_norm=1e-3, steps=1)
    _, scaled = _trained("float16", max_norm=1e-3, steps=1)
    assert exact[0] is not None and scaled[0] is not None
    assert exact[0] > 1e-3
    assert scaled[0].item() == pytest.approx(exact[0].item(), rel=0.02)


def test_sums_are_float32_inside_and_flags_are_put_back() -> None:
    backend = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction, backend.allow_fp16_reduced_precision_reduction
    assert all(before)
    with pytest.raises(ZeroDivisionError), _float32_sums():
        assert not backend.allow_bf16_reduced_precision_reduction
        assert not backend.allow_fp16_reduced_precision_reduction
        raise ZeroDivisionError
    assert before == (backend.allow_bf16_reduced_precision_reduction, backend.allow_fp16_reduced_precision_reduction)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forward_and_backward_on_a_device_sum_in_float32() -> None:
    backend = torch.backends.cuda.matmul
    seen = []

    class _Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append(backend.allow_bf16_reduced_precision_reduction)
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            seen.append(backend.allow_bf16_reduced_precision_reduction)
            return grads[0]

    x = torch.ones(2, requires_grad=True, device="cuda")
    precision = Precision(device="cuda")
    with precision:
        loss = _Look.apply(x).sum()
    precision.backward(loss)
    assert seen == [False, False]
    assert backend.allow_bf16_reduced_precision_reduction


def test_leaving_by_an_error_leaves_nothing_on() -> None:
    with pytest.raises(ZeroDivisionError), Precision():
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_a_float16_step_that_overflows_is_skipped() -> None:
    net = nn.Linear(2, 1)
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    precision = Precision("float16")
    scale = precision.state_dict()["scale"]
    precision.backward((net(torch.ones(1, 2)) * 1e38).sum() * 1e10)
    precision.update(optimizer)
    assert torch.equal(net.weight, before)
    assert precision.state_dict()["scale"] == scale / 2


def test_other_precisions_are_refused() -> None:
    with pytest.raises(UsageError, match="none of bfloat16"):
        Precision("int8")  # type: ignore[arg-type]
