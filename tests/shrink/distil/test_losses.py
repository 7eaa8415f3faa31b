"""Losses against their formulas in float64, and what must hold between them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.shrink.distil.losses import attention_loss, hard_loss, hint_loss, logit_loss, top_k, top_k_loss


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """By hand: T^2 sum p log(p / q), mean over the rows."""
    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        q = [math.exp(v / temperature) for v in s]
        p = [math.exp(v / temperature) for v in t]
        q, p = [v / sum(q) for v in q], [v / sum(p) for v in p]
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / len(student)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_loss_on_logits_is_the_formula_in_float64(temperature: float) -> None:
    student, teacher = logits(5, 7), logits(5, 7, seed=1)
    exact = divergence(student, teacher, temperature)
    assert logit_loss(student, teacher, temperature=temperature).item() == pytest.approx(exact, rel=1e-12)
    assert logit_loss(student.float(), teacher.float(), temperature=temperature).item() == pytest.approx(
        exact, rel=1e-5
    )


def test_the_gradient_keeps_its_size_when_the_temperature_is_high() -> None:
    # Hinton et al. 2015, equation 4: for a high T it tends to (z - v) / N for logits of mean 0, whatever T is.
    teacher = logits(1, 6, seed=1)
    teacher -= teacher.mean()
    student = logits(1, 6)
    student = (student - student.mean()).requires_grad_()
    logit_loss(student, teacher, temperature=1e4).backward()
    assert student.grad is not None
    torch.testing.assert_close(student.grad, (student.detach() - teacher) / 6, rtol=1e-2, atol=1e-3)


@given(num=st.integers(1, 5), temperature=st.floats(0.5, 8.0), seed=st.integers(0, 100))
def test_merged_classes_are_never_further_apart_than_all_of_them(num: int, temperature: float, seed: int) -> None:
    student, teacher = logits(4, 6, seed=seed), logits(4, 6, seed=seed + 1000)
    kept = top_k(teacher, num=num, temperature=temperature)
    whole = logit_loss(student, teacher, temperature=temperature).item()
    merged = top_k_loss(student, *kept, temperature=temperature).item()
    assert -1e-9 <= merged <= whole + 1e-9
    if num == 5:
        assert merged == pytest.approx(whole, rel=1e-9)


def test_the_likeliest_classes_give_a_finite_gradient() -> None:
    student = logits(3, 6).requires_grad_()
    kept = top_k(logits(3, 6, seed=1), num=2, temperature=2.0)
    top_k_loss(student, *kept, temperature=2.0).backward()
    assert student.grad is not None and student.grad.isfinite().all()


def test_places_that_do_not_count_change_nothing() -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    counted = torch.tensor([[True, True, False], [True, False, False]])
    exact = logit_loss(student[counted], teacher[counted])
    student[0, 2] = 1e3
    torch.testing.assert_close(logit_loss(student, teacher, counted=counted), exact)


def test_hints_are_free_of_the_features_scale() -> None:
    teacher = logits(4, 3)
    assert hint_loss(torch.zeros_like(teacher), teacher).item() == pytest.approx(1)
    assert hint_loss(50 * teacher, 50 * teacher).item() == 0
    torch.testing.assert_close(
        hint_loss(7 * logits(4, 3, seed=1), 7 * teacher), hint_loss(logits(4, 3, seed=1), teacher)
    )


def test_attention_is_where_a_layer_looks_not_how_strongly() -> None:
    wide = logits(2, 8, 3, 3)
    assert attention_loss(5 * wide, wide).item() == pytest.approx(0, abs=1e-12)
    assert attention_loss(wide[:, :2], wide).item() > 0
    with pytest.raises(UsageError, match="same places"):
        attention_loss(wide, wide[..., :2])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="same classes"):
        logit_loss(logits(2, 3), logits(2, 4))
    with pytest.raises(UsageError, match="temperature"):
        logit_loss(logits(2, 3), logits(2, 3), temperature=0.0)
    with pytest.raises(UsageError, match="cannot be kept"):
        top_k(logits(2, 3), num=3, temperature=1.0)
    with pytest.raises(UsageError, match="last dimension"):
        hard_loss(logits(2, 3), torch.zeros(3, dtype=torch.long))
