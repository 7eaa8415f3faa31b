"""Captured calls, with a stand-in for the device: a "graph" that runs the call again and copies what it returns."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.blocks.training.captured import captured
from flatout.blocks.training.captured_calls import CapturedCalls
from flatout.core.errors import UsageError
from flatout.core.runtime.own_calls import is_own_call

T = TypeVar("T")
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def rerun(call: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
    """Stands for a CUDA graph: what it returned lies where it did, and holds what a call now returns."""
    mode, results = torch.is_grad_enabled(), call()

    def replay() -> None:
        with torch.set_grad_enabled(mode):
            new = call()
        with torch.no_grad():
            for old, value in zip(results, new, strict=True):  # type: ignore[call-overload]
                if old is not None:
                    old.detach().copy_(value)

    return results, replay


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.actor = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Linear(5, 1)
        self.log_std = nn.Parameter(torch.zeros(1, 3))
        self.scale = 1.0

    def act(self, x: Tensor, action: Tensor | None = None) -> dict[str, Tensor]:
        mean = self.actor(self.norm(x) if len(x) > 1 else x) * self.scale
        probs = torch.distributions.Normal(mean, self.log_std.expand_as(mean).exp())
        action = probs.sample() if action is None else action
        return {"action": action, "log": F.dropout(probs.log_prob(action).sum(1), 0.3), "value": self.critic(x)}

    forward = act


def learn(policy: Policy, act: Callable[..., dict[str, Tensor]], *, device: str = "cpu") -> list[Tensor]:
    """All results, losses and weights of rollouts without gradients and updates with them."""
    optimizer, seen = torch.optim.Adam(policy.parameters()), []
    for _ in range(3):
        with torch.no_grad():
            for _ in range(6):
                seen += list(act(torch.randn(1, 5, device=device)).values())
        for _ in range(6):
            found = act(torch.randn(7, 5, device=device), torch.randn(7, 3, device=device))
            loss = (found["log"].exp() * found["value"].flatten()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
    return [*seen, *(p.detach() for p in policy.parameters()), *policy.buffers(), torch.randn(3, device=device)]


def fresh(device: str = "cpu") -> Policy:
    torch.manual_seed(0)
    return Policy().to(device)


def replays(calls: CapturedCalls) -> list[int]:
    return sorted(graph.num_calls for graph in calls._graphs.values() if graph is not None)


def test_replayed_calls_learn_bit_for_bit_what_the_calls_learn() -> None:
    plain = fresh()
    expected, policy = learn(plain, plain.act), fresh()
    calls = CapturedCalls(policy, rerun)
    found = learn(policy, lambda *args: calls.run(policy.act, args, {}))
    assert replays(calls) == [15, 15], "all but three of each kind"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs_device
def test_on_a_device_graphs_learn_bit_for_bit_what_the_calls_learn() -> None:
    plain = fresh("cuda")
    expected = learn(plain, plain.act, device="cuda")
    policy = fresh("cuda")
    act = captured(Policy.act)
    for one, other in zip(expected, learn(policy, lambda *a: act(policy, *a), device="cuda"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_captured_module_learns_what_a_plain_one_learns_and_its_copies_are_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = learn(plain := fresh(), plain)
    everything: list[CapturedCalls] = []

    def with_stand_in(module: nn.Module) -> CapturedCalls:
        everything.append(CapturedCalls(module, rerun))
        return everything[-1]

    monkeypatch.setattr("flatout.blocks.training.captured.CapturedCalls", with_stand_in)
    policy = fresh()
    assert captured(policy) is policy
    for one, other in zip(expected, learn(policy, policy), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [replays(calls) for calls in everything] == [[15, 15]]
    before = policy.actor[0].weight.clone()
    twin = copy.deepcopy(policy)
    assert twin.state_dict().keys() == policy.state_dict().keys()
    learn(twin, twin)
    assert len(everything) == 1 and torch.equal(policy.actor[0].weight, before)
    assert not torch.equal(twin.actor[0].weight, before)


def test_a_compiled_module_is_not_captured() -> None:
    net = nn.Linear(3, 2)
    net.compile(backend="eager")
    with pytest.raises(UsageError, match="Linear is compiled already"):
        captured(net)


@needs_device
def test_on_a_device_a_captured_module_learns_bit_for_bit_what_a_plain_one_learns() -> None:
    expected = learn(plain := fresh("cuda"), plain, device="cuda")
    policy = captured(fresh("cuda"))
    for one, other in zip(expected, learn(policy, policy, device="cuda"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@needs_device
def test_after_a_capture_that_fails_calls_draw_and_allocate_as_before() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def act(self, x: Tensor) -> Tensor:
            drawn = torch.randn_like(x)
            if torch.cuda.is_current_stream_capturing():
                drawn.sum().item()
            return self.layer(x + drawn)

    def results(act: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return [act(torch.ones(3, 4, device="cuda")) for _ in range(6)] + [torch.randn(5, device="cuda")]

    module, act = Looking().cuda(), captured(Looking.act)
    expected, stream = results(module.act), torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="Looking are not captured"):
        found = results(lambda x: act(module, x))
    assert torch.cuda.current_stream() == stream
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_calls_before_and_in_a_capture_are_marked_as_our_own() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.found = nn.Linear(2, 2), []

        def act(self, x: Tensor) -> Tensor:
            self.found.append(is_own_call())
            return self.layer(x)

    module = Marked()
    calls = CapturedCalls(module, rerun)
    for _ in range(3):
        calls.run(module.act, (torch.ones(1, 2),), {})
    assert module.found == [False, False, False]
    calls.run(module.act, (torch.ones(1, 2),), {})
    assert all(module.found[3:-1])
    assert not is_own_call()


def test_gradients_accumulate_and_two_calls_may_wait_for_one_backward() -> None:
    def gradients(act: Callable[..., dict[str, Tensor]], policy: Policy) -> list[Tensor | None]:
        policy.eval()
        for number in range(6):
            x, action = torch.full((2, 5), float(number)), torch.ones(2, 3)
            act(x, action)["log"].sum().backward()
            (act(x, action)["value"].sum() * act(2 * x, action)["value"].sum()).backward()
        return [p.grad for p in policy.parameters()]

    plain = fresh()
    expected, policy = gradients(plain.act, plain), fresh()
    calls = CapturedCalls(policy, rerun)
    found = gradients(lambda *args: calls.run(policy.act, args, {}), policy)
    assert replays(calls) == [10]  # of 18: three come first, and one of each later pair cannot write over the other
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_second_backward_through_one_call_is_an_error() -> None:
    policy, x = fresh().eval(), torch.randn(2, 5)
    calls = CapturedCalls(policy, rerun)
    for _ in range(3):
        calls.run(policy.act, (x,), {})
    value = calls.run(policy.act, (x,), {})["value"].sum()
    value.backward(retain_graph=True)
    with pytest.raises(UsageError, match="twice"):
        value.backward()


def test_shapes_modes_scalars_and_frozen_weights_are_kinds_of_their_own() -> None:
    policy = fresh()
    calls = CapturedCalls(policy, rerun)

    def run(x: Tensor) -> Tensor:
        value: Tensor = calls.run(policy.act, (x,), {})["value"]
        return value

    for change in (
        lambda: None,
        policy.eval,
        lambda: setattr(policy, "scale", 2.0),
        lambda: policy.critic.requires_grad_(False),
        lambda: setattr(policy.critic, "weight", nn.Parameter(torch.ones(1, 5))),
    ):
        change()
        for _ in range(5):
            x = torch.randn(2, 5)
            torch.testing.assert_close(run(x), policy.critic(x))
    assert replays(calls) == [2, 2, 2, 2, 2]


class Odd(nn.Module):
    """Methods that no graph can stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.outside, self.num = nn.Linear(2, 2), [torch.ones(2)], 0

    def reads_another_tensor(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.outside[0]

    def returns_a_number(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), 3

    def changes_its_argument(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2))

    def draws_in_python(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()

    def stores_what_it_computes(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


@pytest.mark.parametrize("name", [name for name in vars(Odd) if not name.startswith("_")])
def test_what_no_graph_can_stand_for_runs_as_it_is_and_says_so(name: str) -> None:
    odd = Odd()
    calls = CapturedCalls(odd, rerun)
    random.seed(0)
    with pytest.warns(UserWarning, match="calls of Odd are not captured"):
        found = [calls.run(getattr(odd, name), (torch.ones(1, 2),), {}) for _ in range(6)]
    random.seed(0)
    expected = [getattr(odd, name)(torch.ones(1, 2)) for _ in range(6)]
    torch.testing.assert_close(found, expected)
    assert not replays(calls)


def test_a_module_with_hooks_is_not_captured() -> None:
    policy, seen = fresh().eval(), []
    policy.critic.register_forward_hook(lambda *_: seen.append(1))
    calls = CapturedCalls(policy, rerun)
    with pytest.warns(UserWarning, match="hooks of its layers"):
        for _ in range(6):
            calls.run(policy.act, (torch.ones(2, 5),), {})
    assert len(seen) == 6 and not replays(calls)


def test_arguments_that_are_no_number_are_never_captured() -> None:
    odd = Odd()
    calls = CapturedCalls(odd, rerun)
    for _ in range(6):
        calls.run(lambda x, who: x, (torch.ones(2), object()), {})
    assert not calls._graphs


def test_the_decorator_leaves_calls_on_a_processor_alone_and_instances_apart() -> None:
    class Doubled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        @captured
        def times(self, x: Tensor, *, twice: bool = False) -> Tensor:
            """Times the factor."""
            return x * self.factor * (2 if twice else 1)

    one, other = Doubled(2.0), Doubled(3.0)
    for _ in range(6):
        assert one.times(torch.ones(())) == 2 and other.times(torch.ones(()), twice=True) == 6
    assert Doubled.times.__doc__ == "Times the factor."


def test_capturing_leaves_no_trace() -> None:
    policy, seen = fresh(), []
    calls = CapturedCalls(policy, rerun, on_captured=lambda: seen.append(torch.normal))
    x = torch.randn(4, 5)
    for _ in range(3):
        calls.run(policy.act, (x,), {})
    before: list[Any] = [policy.norm.running_mean, torch.normal, torch.distributions.Distribution._validate_args]
    mean, state = before[0].clone(), torch.get_rng_state()
    calls.run(policy.act, (x,), {})
    policy_as_it_is = fresh()
    policy_as_it_is.norm.running_mean = mean  # type: ignore[assignment]
    after_calls = policy.norm.running_mean
    torch.set_rng_state(state)
    policy_as_it_is.act(x)
    assert seen == [torch.normal] and before[1] is torch.normal
    assert before[2] is torch.distributions.Distribution._validate_args
    torch.testing.assert_close(after_calls, policy_as_it_is.norm.running_mean)
