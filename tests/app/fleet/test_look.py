"""A look that goes wrong leaves nothing on the training, and its reason in the record."""

from __future__ import annotations

import pytest
import torch
from tests.fleet_jobs import job
from torch import nn
from torch.optim import optimizer as torchs

from flatout.app.fleet import look as module
from flatout.app.fleet.identity import JobPlace
from flatout.app.fleet.look import JobLook
from flatout.check.capture import Capture
from flatout.check.observe.observer import LoopObserver


def steps(optimizer: torch.optim.Optimizer, net: nn.Module, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).sum().backward()
        optimizer.step()


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(4, 1)


def test_a_look_that_cannot_begin_takes_its_watches_away(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    install = LoopObserver.install

    def fail(self: LoopObserver) -> None:
        install(self)
        raise RuntimeError("no room")

    monkeypatch.setattr(LoopObserver, "install", fail)
    call, hooks = nn.Module.__call__, len(torchs._global_optimizer_post_hooks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    with pytest.raises(RuntimeError, match="no room"):
        JobLook(JobPlace(), job(), lambda _: None).start(optimizer)

    assert nn.Module.__call__ is call
    assert len(torchs._global_optimizer_post_hooks) == hooks
    steps(optimizer, net, 3)


def test_a_diagnosis_that_fails_is_the_reason_in_the_record(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(evidence: object) -> None:
        raise ValueError("odd evidence")

    monkeypatch.setattr(module, "diagnose_all", fail)
    ended: list[JobLook] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    look = JobLook(JobPlace(), job(saved_fraction=None), ended.append)
    assert look.start(optimizer) == ""

    steps(optimizer, net, 30)
    look.finish()

    assert ended == [look]
    assert look.failure == "its diagnosis failed: ValueError: odd evidence"
    assert look.record.saved_fraction is None


def test_a_loop_that_is_observed_already_is_not_looked_into(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_observed", lambda: True)
    monkeypatch.setattr(Capture, "start", lambda *_: pytest.fail("it was begun"))

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert JobLook(JobPlace(), job(), lambda _: None).start(optimizer) == "its steps are observed already"
