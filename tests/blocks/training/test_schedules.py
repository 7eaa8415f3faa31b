from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.blocks.training.schedules import layer_wise, set_rate, warm_up_cosine
from flatout.core.errors import UsageError

STEPS = st.integers(10, 500)


@given(STEPS, st.floats(1e-5, 1.0))
def test_the_schedule_reaches_its_peak_and_stays_in_its_range(steps: int, peak: float) -> None:
    rate = warm_up_cosine(peak, warm_up=steps // 10, steps=steps, floor=0.1 * peak)
    curve = [rate(step) for step in range(steps + 5)]
    assert max(curve) == pytest.approx(peak)
    assert min(curve) >= 0
    assert curve[steps:] == [curve[steps]] * 5
    top = curve.index(max(curve))
    assert curve[: top + 1] == sorted(curve[: top + 1])
    assert curve[top:] == sorted(curve[top:], reverse=True)


def test_the_cosine_is_torchs_own() -> None:
    steps = 50
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    ours = warm_up_cosine(0.5, warm_up=0, steps=steps)
    for step in range(steps + 1):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        cosine.step()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 1)


def test_layers_get_rates_that_fall_towards_the_input() -> None:
    model = _Model()
    optimizer = torch.optim.AdamW(layer_wise(model, decay=0.5, blocks="layers", weight_decay=0.1))
    set_rate(optimizer, 0.8)
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rate[id(model.head.weight)] == rate[id(model.layers[2].weight)] == 0.8
    assert rate[id(model.layers[1].bias)] == 0.4
    assert rate[id(model.layers[0].weight)] == 0.2
    assert rate[id(model.embed.weight)] == pytest.approx(0.1)
    assert all(g["weight_decay"] == 0.1 for g in optimizer.param_groups)
    assert len(rate) == len(list(model.parameters()))


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    held = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=held)
    set_rate(optimizer, 0.25)
    assert held.item() == 0.25


def test_what_makes_no_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="more steps"):
        warm_up_cosine(0.1, warm_up=11, steps=10)
    with pytest.raises(UsageError, match="above 0"):
        warm_up_cosine(0.0, warm_up=1, steps=10)
    with pytest.raises(UsageError, match=r"'blocks\.0'"):
        layer_wise(_Model(), decay=0.5, blocks="blocks")
