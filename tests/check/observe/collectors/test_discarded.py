"""Adversarial loops: which backward passes compute gradients for nothing."""

from __future__ import annotations

import pytest
import torch
from tests.check.observe.test_observer import observe
from torch import nn

from flatout.check.rules.compute.discarded_gradient import RULE
from flatout.core.records.evidence import Evidence

BATCH = 256
"""Large enough that arithmetic, not the dispatch of an operator that a busy machine delays, makes up the time."""


def adversarial(*, detach: bool, freeze: bool, real_first: bool = False) -> Evidence:
    """A generator and a critic in turn, as the tutorials write them."""
    generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64))
    critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def loop() -> None:
        generates = torch.optim.Adam(generator.parameters())
        criticises = torch.optim.Adam(critic.parameters())
        for _ in range(30):
            criticises.zero_grad()
            real = critic(torch.randn(BATCH, 64)) if real_first else None
            fake = generator(torch.randn(BATCH, 16))
            judged = critic(fake.detach() if detach else fake)
            (judged.mean() - (critic(torch.randn(BATCH, 64)) if real is None else real).mean()).backward()
            criticises.step()
            generates.zero_grad()
            critic.requires_grad_(not freeze)
            (-critic(generator(torch.randn(BATCH, 16))).mean()).backward()
            generates.step()
            critic.requires_grad_(True)

    return observe(loop)


@pytest.mark.parametrize(("detach", "freeze"), [(True, True), (True, False), (False, True)])
@pytest.mark.slow
def test_what_is_neither_detached_nor_frozen_is_found(detach: bool, freeze: bool) -> None:
    evidence = adversarial(detach=detach, freeze=freeze)

    facts = {f.text.partition(",")[0]: f for f in evidence.module_facts if f.name == "discarded-gradient"}
    assert set(facts) == {how for how, is_cured in (("all", detach), ("weights", freeze)) if not is_cured}
    for fact in facts.values():
        assert fact.value == 1
        assert "generator(" in evidence.sources[fact.source].text or "critic(" in evidence.sources[fact.source].text


def test_the_finding_is_priced_by_its_share_of_the_backward() -> None:
    evidence = adversarial(detach=False, freeze=True)

    (finding,) = RULE.check(evidence)

    assert 0 < finding.cost_s < evidence.steps.phases["backward"]
    assert ".detach()" in finding.edit


def test_accumulated_gradients_are_used() -> None:
    net = nn.Linear(8, 1)

    def loop() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            for _ in range(3):
                net(torch.randn(4, 8)).mean().backward()
            optimizer.step()

    assert not [f for f in observe(loop).module_facts if f.name == "discarded-gradient"]


@pytest.mark.slow
def test_what_autograd_runs_last_does_not_hide_what_leads_nowhere() -> None:
    """The real images were judged first: their backward comes after that of the generator."""
    evidence = adversarial(detach=False, freeze=True, real_first=True)

    (fact,) = (f for f in evidence.module_facts if f.name == "discarded-gradient")
    first = adversarial(detach=False, freeze=True)
    (other,) = (f for f in first.module_facts if f.name == "discarded-gradient")
    assert fact.text.startswith("all,")
    assert float(fact.text.partition(",")[2]) > 0.25 * float(other.text.partition(",")[2])


def test_what_is_discarded_at_several_lines_is_one_finding() -> None:
    evidence = adversarial(detach=False, freeze=False, real_first=True)

    (finding,) = RULE.check(evidence)

    shares = [float(f.text.partition(",")[2]) for f in evidence.module_facts if f.name == "discarded-gradient"]
    assert len(shares) == 2
    assert finding.cost_s == pytest.approx(sum(shares) * evidence.steps.phases["backward"])
    assert "detach" in finding.edit
    assert "requires_grad_" in finding.edit
    assert len(finding.also) == 1


def test_an_input_whose_gradient_is_read_by_hand_is_not_discarded() -> None:
    net, other = nn.Linear(8, 64), nn.Linear(64, 1)

    def loop() -> None:
        ours, theirs = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(30):
            theirs.zero_grad()
            ours.zero_grad()
            x = torch.randn(4, 8, requires_grad=True)
            other(net(x)).mean().backward()
            theirs.step()
            assert x.grad is not None

    assert not [f for f in observe(loop).module_facts if f.text.startswith("all,")]
