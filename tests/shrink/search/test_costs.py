"""What a call costs, and which limits it passes."""

from __future__ import annotations

import pytest
import torch
from tests.plain_models import plain
from torch import nn

from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import Cost
from flatout.shrink.search.costs import Limit, count_cost, may_hold, over, with_latency


def test_operations_and_bytes_of_a_chain_are_those_of_its_shapes() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).train()
    found = count_cost(model, (torch.zeros(16, 8),))
    assert found.work_flop == 2 * 16 * (8 * 32 + 32 * 4)
    weights = 4 * (8 * 32 + 32 + 32 * 4 + 4)
    assert found.peak_bytes == weights + 4 * 16 * (32 + 32)  # before and after the ReLU, at once
    assert model.training and found == count_cost(model, (torch.zeros(16, 8),))


def test_operations_agree_with_torchs_own_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("cnn", "mlp", "lstm_step"):
        model, inputs, _ = plain(name)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(*inputs)
        assert count_cost(model, inputs).work_flop == counter.get_total_flops()


def test_a_model_timed_beside_itself_is_as_fast_as_itself() -> None:
    model, inputs, _ = plain("mlp")
    calls = []
    found = with_latency(
        count_cost(model, inputs),
        model,
        model,
        inputs=inputs,
        runner=lambda m: lambda: calls.append(m.training),
        time_s=0.01,
    )
    assert found.latency_s is not None and found.latency_fraction is not None
    assert found.latency_fraction[1] <= found.latency_fraction[0] <= found.latency_fraction[2]
    assert calls and not any(calls)


def test_a_limit_is_passed_by_the_upper_end_of_the_interval() -> None:
    cost = Cost(
        num_parameters=1, work_flop=100, peak_bytes=50, latency_s=(1.0, 0.9, 1.2), latency_fraction=(0.3, 0.2, 0.4)
    )
    assert over(cost, Limit(latency_s=1.2, work_flop=100)) == {}
    assert over(cost, Limit(latency_s=1.1, peak_bytes=25)) == {"latency_s": pytest.approx(1.2 / 1.1), "peak_bytes": 2}
    assert list(over(cost, Limit(latency_fraction=0.35))) == ["latency_fraction"]


def test_a_limit_inside_the_interval_may_hold_when_it_is_timed_longer() -> None:
    cost = Cost(num_parameters=1, latency_s=(1.0, 0.9, 1.2), latency_fraction=(0.3, 0.2, 0.4))
    assert may_hold(cost, Limit(latency_s=0.95, latency_fraction=0.35))
    assert not may_hold(cost, Limit(latency_s=0.8, latency_fraction=0.35))


def test_attention_counts() -> None:
    model, inputs, _ = plain("transformer")
    products = sum(
        2 * 4 * 24 * p.numel()
        for n, p in model.named_parameters()
        if p.dim() == 2 and "places" not in n and "words" not in n
    )
    assert count_cost(model, inputs).work_flop == products + 2 * 4 * (4 * 4 * 24 * 24 * 8)


def test_operations_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UsageError, match="give the model as cells"):
        count_cost(nn.LSTM(4, 4), (torch.zeros(3, 2, 4),))
