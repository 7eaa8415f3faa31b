from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training.nan_watch import NanWatch
from flatout.core.errors import NotFiniteError, UsageError

NAN = float("nan")


class _Run:
    """A small model that is trained; from `bad_step` on its target is NaN."""

    def __init__(self, *, keep_every: int = 0, device: str = "cpu", bad_step: int = 10**9) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        kept = (self.net, self.optimizer) if keep_every else ()
        self.watch = NanWatch(*kept, keep_every=keep_every)
        self.bad_step = bad_step
        self.after: list[Tensor] = []

    def step(self, number: int) -> None:
        x = torch.ones(8, 4, device=self.net.weight.device)
        loss = (self.net(x) - (NAN if number >= self.bad_step else 1.0)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.after.append(self.net.weight.detach().clone())
        self.watch(loss)


def test_nan_is_told_with_its_step() -> None:
    run = _Run(bad_step=5)
    with pytest.raises(NotFiniteError, match="step 5") as caught:
        for number in range(10):
            run.step(number)
    assert caught.value.step == 5


def test_infinity_and_any_of_several_count() -> None:
    watch = NanWatch()
    watch(torch.tensor(1.0), torch.ones(3))
    with pytest.raises(NotFiniteError):
        watch(torch.tensor(1.0), torch.tensor([1.0, float("inf")]))


@pytest.mark.parametrize("bad_step", [4, 5, 6, 7, 20])
def test_the_last_good_weights_come_back_with_the_optimizer(bad_step: int) -> None:
    run = _Run(keep_every=3, bad_step=bad_step)
    with pytest.raises(NotFiniteError, match="restore"):
        for number in range(30):
            run.step(number)
    assert run.net.weight.isnan().all()
    step = run.watch.restore()
    # kept every third step, and shown to be good by the step after it
    assert step == max(n for n in range(0, bad_step, 3) if n + 1 < bad_step)
    assert torch.equal(run.net.weight, run.after[step])
    assert all(s["exp_avg"].isfinite().all() and s["step"] == step + 1 for s in run.optimizer.state.values())
    run.bad_step = 10**9
    for number in range(step + 1, step + 8):
        run.step(number)
    assert run.net.weight.isfinite().all()


def test_restoring_twice_gives_the_same_weights() -> None:
    run = _Run(keep_every=2, bad_step=6)
    with pytest.raises(NotFiniteError):
        for number in range(30):
            run.step(number)
    first = run.watch.restore()
    kept = run.net.weight.detach().clone()
    with torch.no_grad():
        run.net.weight.fill_(NAN)
    assert run.watch.restore() == first
    assert torch.equal(run.net.weight, kept)


def test_watching_does_not_change_the_run() -> None:
    watched, plain = _Run(keep_every=2), _Run()
    for number in range(8):
        watched.step(number)
        plain.step(number)
    watched.watch.finish()
    assert torch.equal(watched.net.weight, plain.net.weight)


def test_what_cannot_be_watched_or_restored_is_refused() -> None:
    with pytest.raises(UsageError, match="both or neither"):
        NanWatch(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="late 0"):
        NanWatch(late=0)
    with pytest.raises(UsageError, match="give the loss"):
        NanWatch()()
    with pytest.raises(UsageError, match="known to be good"):
        NanWatch(nn.Linear(1, 1), keep_every=1).restore()


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_nobody_waits_and_nan_is_told_four_steps_late_at_most() -> None:
    run = _Run(device="cuda", bad_step=20, keep_every=5)
    mode = torch.cuda.get_sync_debug_mode()
    last = -1
    try:
        with pytest.raises(NotFiniteError) as caught:
            for number in range(100):
                last = number
                run.step(number)
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert caught.value.step == 20
    assert last <= 24
    assert run.net.weight.isnan().all()
    assert torch.equal(run.after[run.watch.restore()], run.net.weight)
