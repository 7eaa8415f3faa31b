"""The trial of a padded product runs on any device; that it gains something is the device's affair."""

from __future__ import annotations

import pytest

from flatout.check.trials.context import Scene
from flatout.check.trials.runner import run_trials
from flatout.core.records.trial import TimePaddedProduct

SCENE = Scene(
    examples=[],
    num_calls=[],
    outputs=[],
    roots=[],
    optimizers=[],
    loaders=[],
    unused_modules=(),
    device="cpu",
    limit_s=0.2,
)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)])
def test_both_products_are_timed(batch: int, transposed: tuple[bool, bool]) -> None:
    trial = TimePaddedProduct(
        batch=batch, rows=9, inner=17, columns=33, padded=(16, 24, 40), dtype="bfloat16", transposed=transposed
    )
    [result] = run_trials([trial], SCENE, budget_s=2.0)
    assert result.refused == ""
    assert result.now_s is not None
    assert result.cured_s is not None
    assert result.now_s > 0 < result.cured_s


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    trial = TimePaddedProduct(
        batch=1, rows=8, inner=8, columns=8, padded=(8, 8, 8), dtype="float7", transposed=(False, False)
    )
    [result] = run_trials([trial], SCENE, budget_s=2.0)
    assert "float7" in result.refused
