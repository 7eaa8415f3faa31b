"""The first losses of a run, and whether they are those of the untouched script."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.core.errors import PlanError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import LossSpread, Plan, from_toml, to_toml
from flatout.tune.verify.losses import FirstLosses, joined_losses


def trained(num_steps: int, losses: list[float] | None = None) -> Tensor:
    """The weights after so many steps; `losses` gets what backward was called on."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(num_steps):
        # its backward calls backward once more, inside of the first
        hidden = checkpoint(lambda x: first(x).tanh(), torch.randn(4, 8, requires_grad=True), use_reentrant=True)
        assert isinstance(hidden, Tensor)
        loss = second(hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if losses is not None:
            losses.append(loss.item())
    return second.weight.detach().clone()


def test_the_mean_of_the_last_fifth_is_told_once_and_nothing_is_changed() -> None:
    alone: list[float] = []
    expected, original, told = trained(30, alone), torch.autograd.backward, []
    watch = FirstLosses(20, told.append)
    watch.install()
    assert torch.equal(trained(30), expected)
    assert torch.autograd.backward is original, "nothing is left behind once the losses are there"
    assert told == [pytest.approx(sum(alone[16:20]) / 4, rel=1e-6)]


def test_several_losses_of_one_backward_are_added_up() -> None:
    told: list[float] = []
    watch = FirstLosses(1, told.append)
    watch.install()
    x = torch.tensor(2.0, requires_grad=True)
    torch.autograd.backward([x * 3, x * 4])
    assert told == [14.0]


def test_losses_of_micro_batches_that_a_plan_joins_count_as_all_of_them() -> None:
    joining = PlannedLever(id="parallelism.join-micro-batches", guarantee="bounded", parameters={"join": 4})
    assert joined_losses([joining, PlannedLever(id="graph.compile", guarantee="bounded")]) == 4
    larger = PlannedLever(id="parallelism.batch-size", guarantee="quality", parameters={"factor": 2})
    assert joined_losses([joining, larger]) == 0, "its losses are of other samples"
    told: list[float] = []
    rows = torch.arange(80.0).reshape(20, 4)
    for each in (1, 4):
        watch = FirstLosses(40, told.append, each=each)
        watch.install()
        weight = nn.Parameter(torch.tensor(1.0))
        for batch in rows:
            for part in batch.split(4 if each == 4 else 1):
                (weight * part.mean() * len(part) / 4).backward()
        assert watch.num_losses_so_far == 40
    assert told == [pytest.approx(told[1], rel=1e-6), pytest.approx(float(rows[8:10].mean() / 4), rel=1e-6)]


def test_a_scaled_loss_counts_as_it_was() -> None:
    told: list[float] = []
    watch = FirstLosses(2, told.append)
    watch.install()
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=1024.0), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for factor in (3.0, 4.0):
        scaler.scale(weight * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told == [8.0]
    assert "scale" in vars(torch.amp.GradScaler) and torch.amp.GradScaler.scale.__qualname__ == "GradScaler.scale"


def test_backwards_of_other_things_than_tensors_and_later_ones_are_let_be() -> None:
    told: list[float] = []
    watch = FirstLosses(2, told.append)
    watch.install()
    by_name, x = torch.autograd.backward, torch.tensor(2.0, requires_grad=True)
    by_name(torch.autograd.graph.get_gradient_edge(x * 3))  # type: ignore[arg-type]
    by_name([x * 3])
    by_name([x * 3])
    assert (told, watch.num_losses_so_far) == ([6.0], 2)


def test_a_run_that_ends_before_tells_nothing() -> None:
    told: list[float] = []
    watch = FirstLosses(50, told.append)
    watch.install()
    trained(30)
    watch.remove()
    assert (told, watch.num_losses_so_far) == ([], 30)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=5))
def test_every_run_of_the_untouched_script_is_within_the_limits(means: list[float]) -> None:
    spread = LossSpread(num_losses=10, means=tuple(means))
    middle = sum(means) / len(means)
    assert spread.holds(middle) or math.isclose(middle, spread.limits[0], rel_tol=1e-9, abs_tol=1e-9)
    assert not spread.holds(math.nan)
    low, high = spread.limits
    room = max(high - low, 1e-6)
    assert not spread.holds(high + room) and not spread.holds(low - room)


def test_limits_are_those_of_students_t() -> None:
    """Three runs of 1, 2 and 3: 2 +- 4.303 x 1 x sqrt(1 + 1/3)."""
    assert LossSpread(num_losses=10, means=(1.0, 2.0, 3.0)).limits == pytest.approx((-2.9687, 6.9687), abs=1e-3)
    assert LossSpread(num_losses=10, means=(2.0, 2.0, 2.0)).limits == pytest.approx((1.96, 2.04))


def test_a_plan_holds_the_losses_and_refuses_too_few() -> None:
    plan = Plan(losses=LossSpread(num_losses=10, means=(1.0, 2.0, 3.0)))
    assert from_toml(to_toml(plan)) == plan
    assert from_toml(to_toml(Plan())).losses is None
    for means in ((1.0,), (1.0, math.nan, 2.0)):
        with pytest.raises(PlanError, match="needs 2 to 5 finite ones"):
            from_toml(to_toml(Plan(losses=LossSpread(num_losses=10, means=means))))
