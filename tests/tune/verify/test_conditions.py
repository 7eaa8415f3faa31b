"""Where random numbers start, and in which precision models compute."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from flatout.core.runtime.patches import Patches
from flatout.tune.verify.conditions import SidePrecision, seed_all


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed_as_scripts_do(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("own", [0, 7])
def test_seeds_of_the_script_are_moved(own: int) -> None:
    seed_as_scripts_do(own + 5)
    expected = numbers()
    patches = Patches()
    seed_all(5, patches)
    try:
        seed_as_scripts_do(own)
        assert numbers() == expected
    finally:
        patches.undo()
    seed_as_scripts_do(own + 5)
    assert numbers() == expected


def test_a_script_without_seeds_starts_from_the_one_given() -> None:
    found = []
    for seed in (1, 1, 2):
        patches = Patches()
        seed_all(seed, patches)
        found.append(numbers())
        patches.undo()
    assert found[0] == found[1] != found[2]


def test_in_float64_a_model_is_converted_where_it_stands() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    parameters = list(net.parameters())
    args, kwargs, _ = SidePrecision("float64").prepare(
        net, (torch.ones(2, 4), torch.arange(2)), {"mask": [torch.ones(2)]}
    )
    assert [p is q for p, q in zip(parameters, net.parameters(), strict=True)] == [True] * 4
    assert {t.dtype for t in net.state_dict().values()} == {torch.float64, torch.int64}
    assert (args[0].dtype, args[1].dtype, kwargs["mask"][0].dtype) == (torch.float64, torch.int64, torch.float64)
    assert net(args[0]).dtype == torch.float64


def test_autocast_is_around_the_call_alone() -> None:
    net = nn.Linear(4, 3)
    args, kwargs, context = SidePrecision("bfloat16").prepare(net, (torch.ones(2, 4),), {})
    with context:
        assert net(*args, **kwargs).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_without_a_dtype_nothing_changes() -> None:
    given = (torch.ones(2, 4),)
    args, kwargs, _ = SidePrecision("").prepare(nn.Linear(4, 3), given, {})
    assert args is given and kwargs == {}


def test_in_float64_losses_and_scatters_take_what_is_not_of_the_model() -> None:
    output, target = torch.randn(6, 2, dtype=torch.float64, requires_grad=True), torch.randn(6, 2)
    with SidePrecision("float64").surroundings():
        loss = nn.functional.mse_loss(output, target)
        sums = torch.zeros(3, 2).index_add_(0, torch.tensor([0, 1, 1, 2, 2, 2]), output.detach())
        rows = torch.zeros(6, 2)
        rows[1] = output.detach()[1]
        loss.backward()
    assert loss.dtype == torch.float64
    assert sums.dtype == rows.dtype == torch.float32
    assert output.grad is not None and output.grad.dtype == torch.float64
    expected = 2 * (output.detach() - target) / 12
    torch.testing.assert_close(output.grad, expected)


def test_in_float64_forces_are_gradients_of_the_positions_that_were_given() -> None:
    positions = torch.randn(4, 3, requires_grad=True)
    with SidePrecision("float64").surroundings():
        energy = positions.double().square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
    torch.testing.assert_close(forces, 2 * positions)


def test_under_autocast_a_model_returns_float32() -> None:
    net = nn.Linear(3, 2)
    precision = SidePrecision("bfloat16")
    args, kwargs, context = precision.prepare(net, (torch.randn(4, 3),), {})
    with context:
        output = precision.finish(net(*args, **kwargs))
    assert output.dtype == torch.float32
    assert torch.equal(output, output.bfloat16().float())


def test_a_model_that_was_float32_draws_the_same_numbers_in_float64() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            more = torch.empty_like(h).uniform_() + torch.distributions.Normal(torch.zeros_like(h), 1).rsample()
            return h + torch.randn_like(h) + more

    found = []
    for dtype in ("", "float64"):
        torch.manual_seed(0)
        net, precision = Noisy(), SidePrecision(dtype)
        with precision.surroundings():
            args, kwargs, _ = precision.prepare(net, (torch.randn(4, 3),), {})
            found.append(net(*args, **kwargs))
    assert found[1].dtype == torch.float64
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=1e-5)
