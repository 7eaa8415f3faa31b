"""Reinforcement learning in a simulation that magnifies the last digits, proved equal on one run's answers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest

from flatout.core.records.verdict import Verdict
from flatout.tune.verify.environment_answers import Rollouts
from flatout.tune.verify.fork_server import ForkServers
from flatout.tune.verify.proof import prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request, SideProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

LIBRARY = """
    import numpy as np


    class Env:
        pass


    class Logistic(Env):
        '''A chaotic map that is pushed: what differs in the last digit differs in the first after fifty steps.'''

        def reset(self):
            self.x = np.linspace(0.2, 0.7, 8)
            return self.x.astype(np.float32), {}

        def step(self, action):
            self.x = np.clip(3.9 * self.x * (1 - self.x) + 1e-4 * np.tanh(action), 0.01, 0.99)
            return self.x.astype(np.float32), float(self.x.sum()), False, False, {}


    class Wrapper(Env):
        def __init__(self, env):
            self.env = env

        def reset(self):
            return self.env.reset()

        def step(self, action):
            x, reward, *rest = self.env.step(action)
            return x, reward / 8, *rest
"""
SCRIPT = """
    import torch
    from torch import nn
    from gymnasium.core import Logistic, Wrapper

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(policy.parameters(), lr={lr})
    env = Wrapper(Logistic())
    x, _ = env.reset()
    for iteration in range({iterations}):
        states, actions, rewards = [], [], []
        for step in range(256):
            with torch.no_grad():
                state = torch.as_tensor(x)
                action = {mean} + {noise} * torch.randn(8)
            x, reward, *_ = env.step(action.numpy())
            states.append(state); actions.append(action); rewards.append(reward)
        states, actions, rewards = torch.stack(states), torch.stack(actions), torch.tensor(rewards)
        for update in range(2):
            loss = (rewards.float()[:, None] * (policy(states) - actions).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


def script(
    folder: Path, *, mean: str = "policy(state)", noise: float = 0.1, lr: float = 1e-3, iterations: int = 20
) -> Request:
    (folder / "gymnasium").mkdir(parents=True)
    (folder / "gymnasium" / "__init__.py").write_text("")
    (folder / "gymnasium" / "core.py").write_text(textwrap.dedent(LIBRARY))
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(mean=mean, noise=noise, lr=lr, iterations=iterations))
    return Request(target=str(path))


def verdict(before: Request, after: Request) -> Verdict:
    return prove_script(before, after, ProofTerms(num_steps=4, budget_s=1.0, timeout_s=60.0, is_timed=False))


def test_the_same_rollouts_and_updates_are_equal_bit_for_bit(tmp_path: Path) -> None:
    found = verdict(script(tmp_path / "one"), script(tmp_path / "two"))
    assert (found.outcome, found.equality.guarantee, found.equality.num_steps) == ("proved", "exact", 4)
    # the updates were compared: two losses, four gradients and parameters each, and what the policy did in the rollouts
    assert found.equality.num_tensors >= 4 * (1 + 4 + 4) + 2 * 256


@pytest.mark.long
def test_other_rounding_of_the_policy_is_bounded_though_its_own_rollouts_would_be_others(tmp_path: Path) -> None:
    found = verdict(script(tmp_path / "one"), script(tmp_path / "two", mean="policy(state).mul(3).div(3)"))
    assert (found.outcome, found.equality.guarantee) == ("proved", "bounded")


@pytest.mark.parametrize("change", [{"mean": "policy(0.99 * state)"}, {"noise": 0.11}, {"lr": 1.1e-3}])
@pytest.mark.long
def test_another_policy_is_told(tmp_path: Path, change: dict[str, object]) -> None:
    found = verdict(script(tmp_path / "one"), script(tmp_path / "two", **change))  # type: ignore[arg-type]
    assert found.outcome == "different"


UNSEEN = "F.linear(torch.tanh(F.linear(state, *list(policy.parameters())[:2])), *list(policy.parameters())[2:])"


@pytest.mark.long
def test_what_the_policy_does_is_compared_where_nobody_sees_what_its_modules_return(tmp_path: Path) -> None:
    unseen = UNSEEN.replace("F.", "torch.nn.functional.")
    one, two = script(tmp_path / "one"), script(tmp_path / "two", mean=unseen)
    assert verdict(one, two).outcome == "proved"
    wrong = script(tmp_path / "three", mean=unseen.replace("tanh(", "tanh(0.99 * "))
    assert verdict(one, wrong).outcome == "different"


def test_a_side_tells_how_many_updates_lie_between_two_rollouts(
    tmp_path: Path, lasting_servers: ForkServers | None
) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    request = msgspec.structs.replace(script(tmp_path / "one"), folder=str(folder), num_recorded=2)
    with SideProcess(request, lasting_servers) as process:
        cycles = [process.answer(timeout_s=60.0).cycle]
        for size in (1, 4):
            process.order(size)
            cycles.append(process.answer(timeout_s=60.0).cycle)
    assert cycles == [0, 2, 2]  # two updates of one rollout; the second rollout is over; two more


@pytest.mark.parametrize(
    ("num_calls", "cycles"),
    [
        ([5, 5, 5, 10, 10, 10, 15], [0, 0, 0, 3, 3, 3, 3]),
        ([1, 2, 3], [0, 1, 1]),  # an update for each answer
        ([7, 7, 7, 7], [0, 0, 0, 0]),  # what is learnt from was collected once
        ([0, 0, 4, 4, 8], [0, 0, 0, 0, 2]),
    ],
)
def test_rollouts_are_told_by_when_environments_were_called(num_calls: list[int], cycles: list[int]) -> None:
    rollouts = Rollouts()
    found = []
    for calls in num_calls:
        rollouts.add_step(calls)
        found.append(rollouts.cycle)
    assert found == cycles
