"""Walks through one graph for several gradients, in real loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.usage import ModuleFact

Residual = Callable[[nn.Module, Tensor, Tensor], Tensor]


def partial(u: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]  # one by one


def one_by_one(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u = net(torch.cat([x, t], 1))
    return (partial(u, x) + partial(u, t)).square().mean()


def with_ones(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u = net(torch.cat([x, t], 1))
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    return (u_x + u_t).square().mean()


def together(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    return (u_x + u_t).square().mean()


def of_two_results(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u, v = net(torch.cat([x, t], 1)), net(torch.cat([t, x], 1))
    return (partial(u, x) + partial(v, t)).square().mean()


def weighted(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """Vector-Jacobian products with different vectors are different gradients."""
    u = net(torch.cat([x, t], 1))
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    u_t = torch.autograd.grad(u, t, 2 * torch.ones_like(u), create_graph=True)[0]
    return (u_x + u_t).square().mean()


def walks(residual: Residual, *, name: str = "repeated-gradient") -> list[ModuleFact]:
    """The facts of a loop of 20 steps over this residual."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    original = torch.autograd.grad
    capture.start()
    try:
        for _ in range(20):
            x, t = (torch.rand(8, 1, requires_grad=True) for _ in range(2))
            loss = residual(net, x, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert torch.autograd.grad is original
    assert not evidence.notes, evidence.notes
    return [f for f in evidence.module_facts if f.name == name]


def test_two_walks_from_one_result_are_found_at_their_line() -> None:
    [fact] = walks(one_by_one)
    results, walks_fraction, spared_fraction, is_graph = map(float, fact.text.split(","))
    assert (fact.value, results, is_graph) == (2, 1, 1)
    assert 0 < spared_fraction < walks_fraction < 1


@pytest.mark.slow
def test_gradients_that_are_differentiated_again_are_told_by_line() -> None:
    found = walks(one_by_one, name="gradient-of-gradient")
    assert found
    assert all(fact.source >= 0 for fact in found)


@pytest.mark.slow
def test_the_gradient_that_is_handed_in_counts() -> None:
    [fact] = walks(with_ones)
    assert fact.value == 2
    assert not walks(weighted)


@pytest.mark.slow
def test_one_walk_for_all_and_walks_from_different_results_are_left_alone() -> None:
    assert not walks(together)
    assert not walks(of_two_results)
