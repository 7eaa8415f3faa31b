from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim import optimizer as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatout.core.runtime.optimizer_steps import OptimizerStepHooks


@pytest.fixture
def step() -> Iterator[Callable[[], object]]:
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    yield optimizer.step
    torchs._global_optimizer_pre_hooks.clear()
    torchs._global_optimizer_post_hooks.clear()


def test_listeners_are_called_around_a_step_in_their_order(step: Callable[[], object]) -> None:
    calls: list[str] = []
    listeners = [
        OptimizerStepHooks(
            before=lambda *_, n=n: calls.append(f"before {n}"), after=lambda *_, n=n: calls.append(f"after {n}")
        )
        for n in "ab"
    ]
    step()
    assert calls == ["before a", "before b", "after a", "after b"]

    for listener in listeners:
        listener.remove()
        listener.remove()
    step()
    assert len(calls) == 4
    assert not torchs._global_optimizer_pre_hooks
    assert not torchs._global_optimizer_post_hooks


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_listener_may_come_and_go_within_a_step_although_other_hooks_follow(
    step: Callable[[], object], side: str
) -> None:
    calls: list[str] = []
    others: list[OptimizerStepHooks] = []
    register = {"before": register_optimizer_step_pre_hook, "after": register_optimizer_step_post_hook}[side]

    def once(*_: object) -> None:
        calls.append("first")
        first.remove()
        others.append(OptimizerStepHooks(**{side: lambda *_: calls.append("next")}))

    first = OptimizerStepHooks(**{side: once})
    last = register(lambda *_: calls.append("theirs"))

    step()
    step()
    assert calls == ["first", "theirs", "next", "theirs"]

    others[0].remove()
    last.remove()
    step()
    assert len(calls) == 4


def test_the_last_listener_may_leave_within_a_step_before_another_hook(step: Callable[[], object]) -> None:
    listener = OptimizerStepHooks(after=lambda *_: listener.remove())
    register_optimizer_step_post_hook(lambda *_: None)

    step()  # would raise "OrderedDict mutated during iteration"
    step()


def test_a_listener_may_change_the_arguments_of_a_step(step: Callable[..., object]) -> None:
    found: list[object] = []
    listeners = (
        OptimizerStepHooks(
            before=lambda optimizer, args, kwargs: (args, {**kwargs, "closure": lambda: found.append(1)})
        ),
        OptimizerStepHooks(before=lambda optimizer, args, kwargs: found.append(sorted(kwargs))),
    )

    step()

    for listener in listeners:
        listener.remove()
    assert found == [["closure"], 1]
