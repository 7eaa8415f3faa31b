"""Which phase of the step its time belongs to: evaluation, rollouts, environments, forwards without gradients."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from tests.check.observe.test_observer import FAST, observe, train
from torch import Tensor, nn

from flatout.check.capture import Capture


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for gymnasium: its base class, and an environment whose episodes last five steps."""
    module = types.ModuleType("gymnasium.core")

    class Env:
        def step(self, action: Tensor) -> tuple[Tensor, bool]:
            raise NotImplementedError

    module.Env = Env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gymnasium.core", module)

    class Walk(Env):
        def __init__(self) -> None:
            self.num_steps = 0

        def reset(self) -> Tensor:
            self.num_steps = 0
            return torch.zeros(8)

        def step(self, action: Tensor) -> tuple[Tensor, bool]:
            self.num_steps += 1
            sum(range(2000))
            return torch.full((8,), float(self.num_steps)), self.num_steps % 5 == 0

    return Walk


SEEN = torch.ones(8)
"""What an environment shows."""


def policy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def on_policy(environment: type, *, iterations: int, updates: int) -> None:
    net, walk = policy(), environment()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = walk.reset()
    for _ in range(iterations):
        states = []
        for _ in range(10):
            with torch.no_grad():
                action = net(state)
            state, is_over = walk.step(action)
            states.append(state)
            if is_over:
                state = walk.reset()
        batch = torch.stack(states)
        for _ in range(updates):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()


def test_a_rollout_and_its_updates_are_one_step(environments: type) -> None:
    evidence = observe(lambda: on_policy(environments, iterations=16, updates=4))

    assert evidence.steps.kind == "training"
    assert 12 <= evidence.steps.num_observed <= 16
    assert {"environment", "rollout", "forward", "backward", "optimizer"} <= set(evidence.steps.phases)
    assert "evaluation" not in evidence.steps.phases
    backward = [o for o in evidence.operators if o.phase == "backward" and o.op == "aten.mm"]
    assert sum(o.num_calls for o in backward) == 4 * 3
    assert sum(o.num_calls for o in evidence.operators if o.phase == "rollout" and o.op == "aten.addmm") == 20


def test_one_update_a_rollout_keeps_the_update_as_the_step(environments: type) -> None:
    evidence = observe(lambda: on_policy(environments, iterations=20, updates=1))

    assert 17 <= evidence.steps.num_observed <= 20
    assert "environment" in evidence.steps.phases


def test_environments_are_stepped_as_before_afterwards(environments: type) -> None:
    before = vars(environments)["step"]

    observe(lambda: on_policy(environments, iterations=8, updates=2))

    assert vars(environments)["step"] is before


def test_a_target_network_in_every_step_is_no_evaluation() -> None:
    net, target = policy(), policy()

    def loop() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(30):
            states = torch.randn(4, 8)
            with torch.no_grad():
                wanted = target(states)
            optimizer.zero_grad()
            (net(states) - wanted).square().mean().backward()
            optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.phases["no_grad"] > 0
    assert "evaluation" not in evidence.steps.phases
    assert evidence.steps.evaluation_s == 0
    assert sum(o.num_calls for o in evidence.operators if o.phase == "no_grad" and o.op == "aten.addmm") == 2


def test_a_pass_over_other_data_in_some_steps_is_evaluation() -> None:
    net = policy()

    def loop() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(6):
            net.train()
            train(net, steps=8, optimizer=optimizer)
            net.eval()
            with torch.no_grad():
                for _ in range(12):
                    net(torch.randn(64, 8))

    evidence = observe(loop)

    assert evidence.steps.evaluation_s > 0
    assert "no_grad" not in evidence.steps.phases


def test_episodes_of_different_length_are_no_evaluation() -> None:
    """A policy called with gradients, a different number of times in each step (pytorch/examples' actor_critic)."""
    net = policy()

    def loop() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for episode in range(24):
            outputs = [net(torch.randn(8)) for _ in range(3 + (7 * episode) % 11)]
            optimizer.zero_grad()
            torch.cat(outputs).square().mean().backward()
            optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.evaluation_s == 0
    assert "evaluation" not in evidence.steps.phases


def test_training_in_evaluation_mode_is_no_evaluation() -> None:
    """Fine-tuning with frozen normalisation: the module is in evaluation mode, and its graphs are used."""
    net = copy.deepcopy(policy()).eval()

    evidence = observe(lambda: train(net, steps=24))

    assert evidence.steps.phases["forward"] > 0
    assert not {"evaluation", "no_grad"} & set(evidence.steps.phases)


def test_an_optimizer_that_steps_several_times_a_step_is_counted(environments: type) -> None:
    evidence = observe(lambda: on_policy(environments, iterations=16, updates=4))

    assert evidence.optimizers[0].calls == 4


def test_a_warm_up_on_another_line_is_forgotten() -> None:
    net = policy().eval()

    def loop() -> None:
        with torch.no_grad():
            for _ in range(10):
                net(torch.randn(4, 8))
            for _ in range(150):
                net(torch.randn(4, 8))

    evidence = observe(loop)

    assert evidence.steps.kind == "inference"
    assert evidence.steps.num_observed > 30


def test_more_actions_in_some_steps_are_rollout_and_no_evaluation(environments: type) -> None:
    """Episodes end when they end: steps with more calls of the policy than usual evaluate nothing."""
    net, walk = policy(), environments()

    def loop() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        state = walk.reset()
        for number in range(40):
            for _ in range(30 if number % 8 == 7 else 4):
                with torch.no_grad():
                    action = net(state)
                state, _ = walk.step(action)
            optimizer.zero_grad()
            net(state).square().mean().backward()
            optimizer.step()

    steps = observe(loop).steps

    assert steps.evaluation_s == 0
    assert "evaluation" not in steps.phases
    assert steps.phases["no_grad"] > 0, "as in the other steps"
    assert "rollout" not in steps.phases
    assert steps.whole_s > steps.step_s


def test_sampled_lines_of_steps_that_grow_add_up_to_the_step_of_the_report(environments: type) -> None:
    """Episodes last longer and longer: the mean of all steps is not the median step."""
    net, walk = policy(), environments()

    def loop() -> None:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        state = walk.reset()
        for number in range(100):
            for _ in range(4 if number < 70 else 300):
                state, _ = walk.step(state)
            optimizer.zero_grad()
            net(state).square().mean().backward()
            optimizer.step()

    evidence = observe(loop)

    sampled_s = sum(r.seconds for r in evidence.lines if r.process == "main")
    assert 0 < sampled_s <= 1.26 * evidence.steps.whole_s


def test_lines_that_step_an_environment_are_known_without_a_sample(environments: type) -> None:
    """Samples of steps that nobody watched are filed by what is known of their lines."""

    class Silent(environments):  # type: ignore[misc]
        """Steps without an operator of torch's."""

        def step(self, action: Tensor) -> tuple[Tensor, bool]:
            return SEEN, False

    capture = Capture(command=("test",), cwd=".", schedule=FAST, machine=None, propose=lambda _: ())
    capture.start()
    try:
        on_policy(Silent, iterations=20, updates=1)
        phases = capture.observation.deep.phases_of_lines()
    finally:
        capture.finish(exit="finished", exit_code=0)

    assert [seconds for seconds in phases.values() if "environment" in seconds]
