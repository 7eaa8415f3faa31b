"""Rounding noise moves what is rounded, by little, and leaves the rest as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.tune.verify.rounding_noise import RoundingNoise

EPS = torch.finfo(torch.float32).eps


def under_noise(seed: int, compute: object) -> Tensor:
    torch.manual_seed(0)
    with RoundingNoise(seed):
        result = compute()  # type: ignore[operator]
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_result_is_off_by_a_spacing_of_its_dtype_at_most(dtype: torch.dtype) -> None:
    x = torch.rand(1000, dtype=dtype) + 1
    with RoundingNoise(1):
        noisy = x * 1.5
    off = ((noisy.double() - (x * 1.5).double()) / (x * 1.5).double()).abs()
    assert 0 < float(off.max()) <= 2 * torch.finfo(dtype).eps


def test_another_seed_gives_other_noise_and_the_same_seed_the_same() -> None:
    def product() -> Tensor:
        return torch.randn(32, 32) @ torch.randn(32, 32)

    one, same, other = (under_noise(seed, product) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_random_numbers_of_the_script_are_the_same() -> None:
    def draws() -> Tensor:
        torch.exp(torch.ones(10))  # takes noise from generators of its own
        return torch.cat([torch.randn(50), nn.functional.dropout(torch.ones(50), 0.5) / 2])

    torch.manual_seed(0)
    plain = torch.randn(50)
    assert torch.equal(under_noise(1, draws)[:50], plain)
    assert torch.equal(under_noise(1, draws), under_noise(2, draws))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.floor(),
        lambda x: (x > 3).float().sum(),
        lambda x: nn.functional.one_hot(x.long()).float().sum(0),
        lambda x: torch.cat([x, x])[torch.tensor([1, 3])].reshape(1, 2).expand(3, 2),
        lambda x: x.relu().amax(),
    ],
)
def test_whole_numbers_and_what_is_not_rounded_stay(compute: object) -> None:
    x = torch.arange(10.0)
    with RoundingNoise(1):
        noisy = compute(x)  # type: ignore[operator]
    assert torch.equal(noisy, compute(x))  # type: ignore[operator]


def test_a_network_trains_under_noise_as_without_it_up_to_rounding() -> None:
    def losses(seed: int) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 14, 1))
        optimizer = torch.optim.Adam(net.parameters(), foreach=True)
        x, y = torch.randn(8, 3, 16), torch.randn(8, 1)
        found = []
        for _ in range(5):
            loss = (net(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    plain = losses(0)
    with RoundingNoise(1):
        noisy = losses(0)
    assert not torch.equal(plain, noisy)
    assert torch.allclose(plain, noisy, rtol=1e-4)


def test_written_arguments_and_expanded_results_are_allowed() -> None:
    x, out = torch.rand(4, 4), torch.empty(4, 4)
    with RoundingNoise(1), torch.no_grad():
        torch.mul(x, 1.1, out=out)
        torch._foreach_mul_([x], 1.1)
        expanded = torch.rand(1, 4).expand(4, 4) * 1.0
    assert torch.allclose(out, x, rtol=4 * EPS)
    assert expanded.shape == (4, 4)
