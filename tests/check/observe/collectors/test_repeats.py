"""Modules inside others that are run again on inputs that they had before, in real loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact


class Head(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x))  # inside


def observe(step: Callable[[], Tensor], *modules: nn.Module) -> Evidence:
    """A loop of 20 steps, each the backward of what `step` returns, and an update."""
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    parameters = {id(p): p for m in modules for p in m.parameters()}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.01)
    capture.start()
    try:
        for _ in range(20):
            loss = step()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not evidence.notes, evidence.notes
    return evidence


def repeats(evidence: Evidence) -> list[ModuleFact]:
    return [f for f in evidence.module_facts if f.name == "double-forward-inside"]


def encoder(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU())


def test_an_encoder_that_two_heads_run_on_one_batch_is_found() -> None:
    shared = encoder()
    actor, critic = Head(shared), Head(shared)

    def step() -> Tensor:
        x = torch.randn(4, 8)
        return actor(x).mean() + critic(x).square().mean()

    evidence = observe(step, actor, critic)

    [fact] = repeats(evidence)
    assert (fact.module, fact.kind, fact.value, float(fact.text)) == ("Head (2).encoder", "Sequential", 1.0, 1.0)
    source = evidence.source_of(fact.source)
    assert source is not None
    assert source.text.endswith("# inside")


def test_an_encoder_that_was_run_alone_before_is_found() -> None:
    shared = encoder()
    head = Head(shared)

    def step() -> Tensor:
        x = torch.randn(4, 8)
        return shared(x).mean() + head(x).square().mean()

    [fact] = repeats(observe(step, head))
    assert fact.module == "Head.encoder"


@pytest.mark.slow
@pytest.mark.parametrize("other", ["dropout", "other batch", "changed in place", "own encoders"])
def test_calls_that_differ_are_no_repeats(other: str) -> None:
    shared = encoder(0.5 if other == "dropout" else 0.0)
    actor, critic = Head(shared), Head(encoder() if other == "own encoders" else shared)

    def step() -> Tensor:
        x = torch.randn(4, 8)
        first = actor(x).mean()
        if other == "other batch":
            return first + critic(x.clone()).mean()
        if other == "changed in place":
            with torch.no_grad():
                x.add_(1.0)
        return first + critic(x).mean()

    if other == "changed in place":  # the backward of the first needs what was there
        for parameter in shared.parameters():
            parameter.requires_grad_(False)
    assert not repeats(observe(step, actor, critic))


def test_what_a_checkpoint_computes_again_in_the_backward_is_no_repeat() -> None:
    head = Head(encoder())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.head, x, use_reentrant=False)
            return result

    outer = Outer()
    assert not repeats(observe(lambda: outer(torch.randn(4, 8)).mean(), outer))


def test_an_encoder_whose_first_graph_is_freed_cannot_be_run_once() -> None:
    shared = encoder()
    actor, critic = Head(shared), Head(shared)

    def step() -> Tensor:
        x = torch.randn(4, 8)
        actor(x).mean().backward()
        return critic(x).square().mean()

    evidence = observe(step, actor, critic)

    assert not repeats(evidence)
    assert [f.module for f in evidence.module_facts if f.name == "double-forward-inside-freed"] == ["Head (2).encoder"]
