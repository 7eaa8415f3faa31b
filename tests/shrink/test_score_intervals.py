"""Intervals: their closed forms, their symmetries, and how often they hold the truth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import UsageError
from flatout.shrink.score_intervals import mean_interval, paired_difference


def shares(both: int, first: int, second: int, neither: int) -> tuple[list[float], list[float]]:
    pairs = [(1.0, 1.0)] * both + [(1.0, 0.0)] * first + [(0.0, 1.0)] * second + [(0.0, 0.0)] * neither
    return [a for a, _ in pairs], [b for _, b in pairs]


def test_wilson_is_the_textbook_example() -> None:
    # 81 of 263: 0.2553 to 0.3662 (Newcombe, Statistics in Medicine 17, 1998, p. 857-872, table I, method 3).
    found = mean_interval([1.0] * 81 + [0.0] * 182)
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))


@given(*(st.integers(0, 40) for _ in range(3)), st.integers(1, 40))
def test_the_difference_turned_round_is_the_interval_turned_round(
    both: int, first: int, second: int, neither: int
) -> None:
    scores, others = shares(both, first, second, neither)
    there, back = paired_difference(scores, others), paired_difference(others, scores)
    assert -1 <= there.low <= there.value <= there.high <= 1
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


def test_models_that_err_alike_are_told_apart_by_fewer_samples() -> None:
    alike, apart = paired_difference(*shares(480, 10, 0, 10)), paired_difference(*shares(470, 20, 10, 0))
    assert alike.value == apart.value
    assert alike.high - alike.low < apart.high - apart.low and alike.low > 0


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    generator, held = torch.Generator().manual_seed(0), 0
    chances = torch.tensor([0.93, 0.03, 0.02, 0.02])
    for _ in range(600):
        drawn = torch.multinomial(chances, 300, replacement=True, generator=generator).bincount(minlength=4).tolist()
        found = paired_difference(*shares(*drawn))
        held += found.low <= 0.01 <= found.high
    assert 0.93 <= held / 600 <= 0.985


def test_scores_that_are_no_shares_have_a_normal_interval() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).double().tolist()
    found = mean_interval(values)
    assert found.method == "normal" and found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.1)
    assert paired_difference(values, [v - 0.5 for v in values]).low == pytest.approx(0.5)


def test_what_has_no_interval_is_refused() -> None:
    for scores in ([], [0.5] * 29, [float("nan")] * 50):
        with pytest.raises(UsageError):
            mean_interval(scores)
    with pytest.raises(UsageError, match="no pairs"):
        paired_difference([1.0], [1.0, 0.0])
