"""One real step on a time axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from flatout.check.capture import Capture
from flatout.check.observe.evidence.spans import MOST_SPANS
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.span import Span

pytestmark = pytest.mark.slow


def observe(*, steps: int, layers: int = 2, micro_batches: int = 1) -> Evidence:
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    capture.start()
    for _ in range(steps):
        for _ in range(micro_batches):
            net(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return capture.finish(exit="finished", exit_code=0)


def track(evidence: Evidence, name: str) -> list[Span]:
    assert evidence.timeline is not None
    return [s for s in evidence.timeline.spans if s.track == name]


def ends(span: Span) -> float:
    return span.start_s + span.duration_s


def test_phases_follow_one_another_without_gaps() -> None:
    evidence = observe(steps=14)

    phases = track(evidence, "phase")
    assert evidence.timeline is not None
    assert [p.name for p in phases if p.name != "other"] == ["forward", "backward", "optimizer"]
    assert phases[0].start_s == 0.0
    for before, after in pairwise(phases):
        assert after.start_s == pytest.approx(ends(before))
        assert after.name != before.name
    assert ends(phases[-1]) == pytest.approx(evidence.timeline.duration_s)


def test_operators_lie_in_order_inside_their_phase() -> None:
    evidence = observe(steps=14)

    phases, operators = track(evidence, "phase"), track(evidence, "host")
    names = [o.name for o in operators]
    assert evidence.timeline is not None and evidence.timeline.is_scaled
    assert names.index("aten.addmm") < names.index("aten.mean") < names.index("aten.mm")
    for before, after in pairwise(operators):
        assert after.start_s >= ends(before) - 5e-9  # both are rounded
    for operator in operators:
        inside = [p for p in phases if p.start_s - 5e-9 <= operator.start_s and ends(operator) <= ends(p) + 5e-9]
        assert inside, operator
    source = evidence.source_of(operators[names.index("aten.addmm")].source)
    assert source is not None and "backward()" in source.text


def test_micro_batches_take_turns() -> None:
    phases = track(observe(steps=14, micro_batches=3), "phase")

    assert [p.name for p in phases if p.name in ("forward", "backward")] == ["forward", "backward"] * 3


def test_a_step_of_many_operators_keeps_the_longest() -> None:
    evidence = observe(steps=14, layers=200)

    assert evidence.timeline is not None
    assert len(evidence.timeline.spans) <= MOST_SPANS
    assert evidence.timeline.num_left_out > 0


def test_without_steps_there_is_no_timeline() -> None:
    assert observe(steps=1).timeline is None
