"""Captured functions and methods of objects that hold tensors, with a stand-in for the device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.blocks.training.test_captured_calls import needs_device, replays, rerun
from torch import Tensor

from flatout.blocks.training.captured import captured
from flatout.blocks.training.captured_state import StateCalls


class Balls:
    """Balls that bounce, and are thrown again at random when they are too old."""

    def __init__(self, device: str = "cpu") -> None:
        self.height, self.speed = torch.ones(4, device=device), torch.zeros(4, device=device)
        self.age = torch.arange(4, device=device)
        self.gravity = torch.full((4,), 9.8, device=device)
        self.dt, self.history, self.count = 0.1, [0.0], 0

    def step(self, push: Tensor, *, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        self.speed = self.speed + self.dt * (push - self.gravity)
        self.height = (self.height + self.dt * self.speed).abs()
        self.age = self.age + 1
        over = self.age >= 7
        self.height = torch.where(over, torch.rand_like(self.height), self.height)
        self.age = torch.where(over, torch.zeros_like(self.age), self.age)
        return self.observe() + noise, over

    def observe(self) -> Tensor:
        return torch.stack([self.height, self.speed], dim=1)

    def counted(self, push: Tensor) -> Tensor:
        self.count += 1
        return push + self.count

    def remembered(self, push: Tensor) -> Tensor:
        self.history.append(1.0)
        return push + len(self.history)

    def written(self, push: Tensor) -> Tensor:
        self.age += 1
        return push + self.age


def played(step: Any, balls: Balls) -> list[Tensor]:
    """All that 20 steps return, what the object holds then, and the next random numbers."""
    torch.manual_seed(0)
    device = balls.height.device
    found: list[Tensor] = []
    for i in range(20):
        found += step(torch.full((4,), float(i % 3), device=device))
    return [*found, balls.height, balls.speed, balls.age, balls.gravity, torch.rand(3, device=device)]


def test_an_object_moves_as_without_graphs() -> None:
    plain, balls, calls = Balls(), Balls(), StateCalls("step", rerun)
    gravity = balls.gravity
    expected = played(plain.step, plain)
    found = played(lambda push: calls.of_method(Balls.step, balls, (push,), {}), balls)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert replays(calls._of_object[balls]) == [17]
    assert balls.gravity is gravity  # what the method only reads stays the tensor that it was


def test_two_objects_have_graphs_and_tensors_of_their_own() -> None:
    calls, balls = StateCalls("step", rerun), [Balls(), Balls()]
    for i in range(6):
        for number, one in enumerate(balls):
            calls.of_method(Balls.step, one, (torch.full((4,), float(number + i)),), {"noise": 1.0})
    assert not torch.equal(balls[0].speed, balls[1].speed)
    assert [replays(calls._of_object[one]) for one in balls] == [[3], [3]]


@pytest.mark.filterwarnings("ignore:calls of balls are not captured")
@pytest.mark.parametrize("method", [Balls.counted, Balls.remembered, Balls.written])
def test_what_changes_more_than_a_graph_holds_runs_as_it_is(method: Any) -> None:
    plain, balls, calls = Balls(), Balls(), StateCalls("balls", rerun)
    push = torch.ones(4)
    expected = [method(plain, push) for _ in range(8)]
    found = [calls.of_method(method, balls, (push,), {}) for _ in range(8)]
    assert not replays(calls._of_object[balls])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert (balls.count, balls.history) == (plain.count, plain.history)
    assert torch.equal(balls.age, plain.age)


def test_a_number_that_changed_is_another_kind_of_call() -> None:
    balls, calls = Balls(), StateCalls("step", rerun)
    for dt in (0.1, 0.2):
        balls.dt = dt
        before = balls.speed
        for _ in range(5):
            calls.of_method(Balls.step, balls, (torch.ones(4),), {})
        assert torch.allclose(balls.speed - before, torch.full((4,), 5 * dt * (1 - 9.8)), atol=1e-5)
    assert replays(calls._of_object[balls]) == [2, 2]


def discounted(rewards: Tensor, last: Tensor, discount: float = 0.9) -> Tensor:
    found, following = torch.zeros_like(rewards), last
    for t in reversed(range(len(rewards))):
        following = rewards[t] + discount * following
        found[t] = following
    return found


def test_a_function_is_replayed_for_each_kind_of_call() -> None:
    calls = StateCalls("discounted", rerun)
    for num in (3, 5):
        for _ in range(6):
            rewards, last = torch.randn(num, 2), torch.randn(2)
            assert torch.equal(calls.of_function(discounted, (rewards, last), {}), discounted(rewards, last))
    assert calls._own is not None
    assert replays(calls._own) == [3, 3]


def test_a_function_has_gradients() -> None:
    calls = StateCalls("discounted", rerun)
    for _ in range(6):
        rewards, last = torch.randn(3, 2, requires_grad=True), torch.randn(2)
        found = torch.autograd.grad(calls.of_function(discounted, (rewards, last), {}).sum(), rewards)[0]
        assert torch.equal(found, torch.autograd.grad(discounted(rewards, last).sum(), rewards)[0])


def test_decorated_functions_and_methods_run_as_they_are_without_a_device() -> None:
    class Decorated(Balls):
        step = captured(Balls.step)

    plain, balls = Balls(), Decorated()
    for one, other in zip(played(balls.step, balls), played(plain.step, plain), strict=True):
        assert torch.equal(one, other)
    rewards, last = torch.randn(4, 2), torch.randn(2)
    assert torch.equal(captured(discounted)(rewards, last, discount=0.5), discounted(rewards, last, 0.5))


def test_an_object_without_tensors_or_that_compares_by_value_runs_as_it_is() -> None:
    class Point:
        def __init__(self) -> None:
            self.x = torch.zeros(2)

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        def moved(self, by: Tensor) -> Tensor:
            self.x = self.x + by
            return self.x

    calls, point = StateCalls("moved", rerun), Point()
    for i in range(6):
        assert torch.equal(calls.of_method(Point.moved, point, (torch.ones(2),), {}), torch.full((2,), i + 1.0))


@needs_device
def test_on_a_device_an_object_moves_as_without_graphs() -> None:
    class Decorated(Balls):
        step = captured(Balls.step)

    plain, balls = Balls("cuda"), Decorated("cuda")
    for one, other in zip(played(balls.step, balls), played(plain.step, plain), strict=True):
        assert torch.equal(one, other)


@needs_device
def test_on_a_device_a_decorated_function_is_the_same() -> None:
    function = captured(discounted)
    for _ in range(6):
        rewards, last = torch.randn(16, 2, device="cuda"), torch.randn(2, device="cuda")
        assert torch.equal(function(rewards, last), discounted(rewards, last))


@pytest.mark.parametrize("num_calls", [1, 6])
def test_an_object_can_go_with_its_graphs(num_calls: int) -> None:
    calls, balls = StateCalls("step", rerun), Balls()
    for _ in range(num_calls):
        calls.of_method(Balls.step, balls, (torch.ones(4),), {})
    assert replays(calls._of_object[balls]) == [3] * (num_calls == 6)
    gone = weakref.ref(balls)
    del balls
    gc.collect()
    assert gone() is None
