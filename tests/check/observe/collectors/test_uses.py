"""Observing calls that are no operators, in real loops in this process."""

from __future__ import annotations

import builtins
import copy
import gc
import io
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributions import Distribution, Normal

from flatout.check.capture import Capture
from flatout.check.observe.collectors.host_reads import HostReads
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import CallUse

STEPS = 20


def observe(
    body: Callable[[nn.Module, torch.optim.Optimizer], object], after: Callable[[], object] = int, *, num_reads: int = 1
) -> Evidence:
    """A training loop of 20 steps with `body` at the end of each, and `after` behind it."""
    schedule = Schedule(trials_budget_s=0.0, num_reads=num_reads)
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    capture.start()
    try:
        for _ in range(STEPS):
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            body(net, optimizer)
        after()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    return evidence


def only(evidence: Evidence, name: str) -> CallUse:
    [use] = [u for u in evidence.uses if u.name == name]
    assert evidence.sources[use.source].file == __file__
    return use


def test_a_saved_state_has_its_calls_seconds_and_bytes() -> None:
    use = only(observe(lambda net, _: torch.save(net.state_dict(), io.BytesIO())), "torch.save")
    assert use.calls == pytest.approx(1, rel=0.1)
    assert use.seconds > 0
    assert (use.detail, use.bytes) == ("tensors", 4 * (8 * 16 + 16 + 16 + 1))


def test_what_is_saved_after_the_loop_belongs_to_no_step() -> None:
    net = nn.Linear(2, 2)
    evidence = observe(lambda *_: None, after=lambda: torch.save(net.state_dict(), io.BytesIO()))
    assert not [u for u in evidence.uses if u.name == "torch.save"]


def test_copies_of_modules_and_of_settings_are_distinguished() -> None:
    def body(net: nn.Module, _: object) -> None:
        copy.deepcopy(net)
        copy.deepcopy({"lr": 0.1})

    details = {u.detail for u in observe(body).uses if u.name == "copy.deepcopy"}
    assert details == {"module", "other"}


@pytest.mark.parametrize("to_none", [True, False])
def test_how_gradients_are_dropped_is_noted(to_none: bool) -> None:
    use = only(observe(lambda _, optimizer: optimizer.zero_grad(set_to_none=to_none)), "Optimizer.zero_grad")
    assert use.detail == f"set_to_none={to_none}"


def test_where_the_data_of_a_tensor_came_from_is_noted() -> None:
    def body(*_: object) -> None:
        torch.tensor([[1.0] * 100] * 4)
        torch.tensor([1, 2])
        torch.from_numpy(torch.ones(3).numpy())

    evidence = observe(body)

    assert {u.detail for u in evidence.uses if u.name == "torch.tensor"} == {"list", "short list"}
    assert only(evidence, "torch.from_numpy").detail == "array"
    assert only(evidence, "Tensor.numpy").calls == 1


def test_a_grad_scaler_is_noted_with_the_dtype_it_scales_for() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def body(*_: object) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.ones(1, requires_grad=True).sum()
        scaler.scale(loss)

    assert only(observe(body), "GradScaler.scale").detail == "enabled=True, device=cpu, autocast=bfloat16"


def test_checks_prints_and_collections_are_counted_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body(net: nn.Module, _: object) -> None:
        for parameter in net.parameters():
            torch.isnan(parameter).any()
        print("step")
        gc.collect()

    evidence = observe(body)

    assert only(evidence, "torch.isnan").calls == 4
    assert only(evidence, "print").calls == pytest.approx(1, rel=0.1)
    assert only(evidence, "gc.collect").seconds > 0
    assert capsys.readouterr().out == "step\n" * STEPS


def test_files_saved_in_few_steps_are_a_share_of_each() -> None:
    numbers = []

    def body(net: nn.Module, _: object) -> None:
        numbers.append(1)
        if len(numbers) % 5 == 0:
            torch.save({"weights": torch.zeros(500_000)}, io.BytesIO())

    steps = observe(body).steps
    assert 0 < steps.occasional_s < steps.whole_s


def test_every_watch_is_undone() -> None:
    before = (builtins.print, torch.save, copy.deepcopy, torch.tensor, torch.isnan, gc.collect)
    observe(lambda *_: None)
    assert (builtins.print, torch.save, copy.deepcopy, torch.tensor, torch.isnan, gc.collect) == before


@pytest.mark.parametrize("checks", [True, False])
def test_checks_of_distributions_are_timed_at_the_users_line(checks: bool) -> None:
    def act(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        policy = torch.distributions.Categorical(logits=torch.zeros(4, 3), validate_args=checks)
        policy.log_prob(policy.sample())

    evidence = observe(act)

    found = {u.name: u for u in evidence.uses if u.name.startswith("Distribution.") and u.detail == "checked"}
    assert set(found) == ({"Distribution.__init__", "Distribution._validate_sample"} if checks else set())
    assert all(evidence.sources[u.source].file == __file__ and u.calls == 1 for u in found.values())


def test_watching_host_reads_inside_a_call_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of a distribution read their results; each read is filed while they run."""
    original = HostReads._note

    def slow(self: HostReads, name: str, *args: object) -> None:
        time.sleep(0.01)
        original(self, name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(HostReads, "_note", slow)

    evidence = observe(lambda *_: Normal(torch.zeros(4), torch.ones(4), validate_args=True))

    use = only(evidence, "Distribution.__init__")
    assert (use.calls, use.detail) == (1, "checked")
    assert 0 < use.seconds < 0.01


def test_frequent_calls_take_what_they_took_in_the_best_of_several_steps() -> None:
    slow = []

    class Late(Normal):
        """Takes long to check its arguments the first time that a watched step constructs it."""

        @property
        def arg_constraints(self) -> dict[str, object]:  # type: ignore[override]
            if hasattr(Distribution.__init__, "__wrapped__") and not slow:
                slow.append(1)
                time.sleep(0.05)
            return Normal.arg_constraints

    evidence = observe(lambda *_: Late(torch.zeros(4), torch.ones(4), validate_args=True), num_reads=2)

    assert slow
    use = only(evidence, "Distribution.__init__")
    assert use.calls == 1
    assert use.seconds < 0.025
