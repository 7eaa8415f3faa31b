"""What may be lost: read from text, and in the unit of a metric."""

from __future__ import annotations

import pytest

from flatout.core.errors import UsageError
from flatout.core.records.allowance import Allowance


@pytest.mark.parametrize("text", ["", "one", "-1%", "-1", "nan", "1%%", "inf", "5 %x"])
def test_a_loss_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--accuracy-loss .* cannot be allowed; write '1%'"):
        Allowance.of(text, name="--accuracy-loss")


@pytest.mark.parametrize(
    ("text", "metric", "loss"), [("1%", -50.0, 0.5), ("0.01", 50.0, 0.01), (0, 50.0, 0.0), (" 2 % ", 1.0, 0.02)]
)
def test_a_share_is_of_the_metric_and_a_number_is_in_its_unit(text: str | float, metric: float, loss: float) -> None:
    assert Allowance.of(text).of_metric(metric) == pytest.approx(loss)
