from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.candidate import CandidateModel, MetricScore, ShrinkTask
from flatout.shrink.compose.trials import lost


def candidate(evaluate: Callable[[Any], Any]) -> CandidateModel:
    return CandidateModel.of(nn.Linear(2, 2), ShrinkTask(inputs=(torch.zeros(1, 2),), evaluate=evaluate))


def test_a_number_and_numbers_are_metrics() -> None:
    assert candidate(lambda call: 0.5).metric() == MetricScore(0.5)
    assert candidate(lambda call: torch.tensor(0.5)).metric() == MetricScore(0.5)
    assert candidate(lambda call: torch.tensor([1.0, 0.0])).metric() == MetricScore(0.5, (1.0, 0.0))


@pytest.mark.parametrize("metric", [None, "good", [], {}])
def test_anything_else_is_refused(metric: object) -> None:
    with pytest.raises(UsageError, match="return a number"):
        candidate(lambda call: metric).metric()


def test_a_loss_is_positive_where_the_metric_is_worse_whichever_way_it_goes() -> None:
    assert lost(MetricScore(0.9), MetricScore(0.8), is_cost=False)[0] > 0
    assert lost(MetricScore(0.9), MetricScore(0.8), is_cost=True)[0] < 0


def test_samples_give_an_interval_around_the_loss_and_numbers_none() -> None:
    before, after = (1.0,) * 90 + (0.0,) * 10, (1.0,) * 80 + (0.0,) * 20
    value, interval = lost(MetricScore(0.9, before), MetricScore(0.8, after), is_cost=False)
    assert interval is not None
    assert interval[0] < value < interval[1]
    assert value == pytest.approx(0.1)
    assert lost(MetricScore(0.9), MetricScore(0.8), is_cost=False)[1] is None


def test_a_sample_that_is_not_a_number_makes_the_loss_none() -> None:
    value, interval = lost(MetricScore(0.9, (1.0,) * 40), MetricScore(math.nan, (math.nan,) * 40), is_cost=False)
    assert math.isnan(value)
    assert interval is None
