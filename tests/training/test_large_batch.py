"""LARS and LAMB against their formulas in float64, layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.training.large_batch import Lamb, Lars

SHAPES = (5, 3), (7,), (4, 2, 3, 3), ()


def weights(dtype: torch.dtype, *, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def lars_by_hand(w: Tensor, v: Tensor, g: Tensor, *, lr: float, momentum: float, decay: float, trust: float) -> None:
    if w.dim() > 1:
        ratio = trust * w.norm() / (g.norm() + decay * w.norm())
        v.copy_(momentum * v + lr * ratio * (g + decay * w))
    else:
        v.copy_(momentum * v + lr * g)
    w.sub_(v)


def lamb_by_hand(w: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, *, lr: float, decay: float) -> None:
    m.copy_(0.9 * m + 0.1 * g)
    v.copy_(0.999 * v + 0.001 * g * g)
    u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
    if w.dim() > 1:
        u = u + decay * w
        u = u * w.norm() / u.norm()
    w.sub_(lr * u)


def taken(optimizer: torch.optim.Optimizer, own: list[nn.Parameter], *, first: int = 0, steps: int = 5) -> None:
    for step in range(first, first + steps):
        for p, g in zip(own, gradients(step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_lars_is_its_formula(dtype: torch.dtype, tolerance: float) -> None:
    own, exact = weights(dtype), [p.detach().clone() for p in weights(torch.float64)]
    speeds = [torch.zeros_like(p) for p in exact]
    taken(Lars(own, 0.5, weight_decay=0.1, trust=0.02), own)
    for step in range(5):
        for w, v, g in zip(exact, speeds, gradients(step), strict=True):
            lars_by_hand(w, v, g, lr=0.5, momentum=0.9, decay=0.1, trust=0.02)
    for p, w in zip(own, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_lamb_is_its_formula(dtype: torch.dtype, tolerance: float) -> None:
    own, exact = weights(dtype), [p.detach().clone() for p in weights(torch.float64)]
    first, second = ([torch.zeros_like(p) for p in exact] for _ in range(2))
    taken(Lamb(own, 0.03, weight_decay=0.1), own)
    for step in range(5):
        for w, m, v, g in zip(exact, first, second, gradients(step), strict=True):
            lamb_by_hand(w, m, v, g, step + 1, lr=0.03, decay=0.1)
    for p, w in zip(own, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_layer_moves_by_the_same_share_whatever_its_gradients_size(kind: type[Lars] | type[Lamb]) -> None:
    steps = []
    for scale in (1.0, 1000.0):
        p = weights(torch.float64)[0]
        before, p.grad = p.detach().clone(), scale * gradients(0)[0]
        options = {"eps": 0.0} if kind is Lamb else {}
        kind([p], 0.1, weight_decay=0.0, **options).step()
        steps.append(p.detach() - before)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_zero_weights_and_zero_gradients_give_finite_steps(kind: type[Lars] | type[Lamb]) -> None:
    zeros, still = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    zeros.grad, still.grad = torch.ones(3, 3), torch.zeros(3, 3)
    kind([zeros, still], 0.1, weight_decay=0.0).step()
    assert zeros.isfinite().all() and (zeros != 0).all()
    assert torch.equal(still.detach(), torch.ones(3, 3))


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_loaded_state_goes_on_bit_for_bit(kind: type[Lars] | type[Lamb]) -> None:
    own = weights(torch.float32)
    optimizer = kind(own, 0.1)
    taken(optimizer, own, steps=3)
    others = [nn.Parameter(p.detach().clone()) for p in own]
    second = kind(others, 0.7)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    taken(optimizer, own, first=3, steps=3)
    taken(second, others, first=3, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))


def test_biases_and_norms_are_left_out_unless_told_otherwise() -> None:
    moved = []
    for plain_dims in (1, -1):
        p = nn.Parameter(torch.ones(4, dtype=torch.float64))
        p.grad = torch.ones(4, dtype=torch.float64)
        Lars([p], 1.0, trust=0.5, weight_decay=0.0, plain_dims=plain_dims).step()
        moved.append(float(1 - p.detach()[0]))
    assert moved == [1.0, 0.5]


def test_the_ratio_of_lamb_can_be_bounded() -> None:
    p = nn.Parameter(torch.full((2, 2), 100.0, dtype=torch.float64))
    p.grad = torch.ones(2, 2, dtype=torch.float64)
    Lamb([p], 1.0, weight_decay=0.0, most_ratio=3.0, eps=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), 97.0, dtype=torch.float64))


def test_groups_have_their_own_values_and_parameters_without_gradient_are_left() -> None:
    a, b, c = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    a.grad, b.grad = torch.ones(2, 2), torch.ones(2, 2)
    Lamb([{"params": [a], "lr": 0.0}, {"params": [b, c]}], 0.1).step()
    assert torch.equal(a.detach(), torch.ones(2, 2)) and torch.equal(c.detach(), torch.ones(2, 2))
    assert (b.detach() < 1).all()


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_bfloat16_weights_have_norms_in_float32(kind: type[Lars] | type[Lamb]) -> None:
    p = nn.Parameter(torch.full((300, 300), 0.01, dtype=torch.bfloat16))
    p.grad = torch.full((300, 300), 0.01, dtype=torch.bfloat16)
    kind([p], 0.1, weight_decay=0.0).step()
    assert p.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lars(p, -1.0),
        lambda p: Lars(p, 1.0, momentum=1.0),
        lambda p: Lars(p, 1.0, trust=-0.1),
        lambda p: Lamb(p, float("nan")),
        lambda p: Lamb(p, betas=(0.9, 1.0)),
        lambda p: Lamb(p, most_ratio=0.0),
        lambda p: Lamb(p, weight_decay=-1.0),
    ],
)
def test_bad_values_are_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make(weights(torch.float32))  # type: ignore[operator]


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        Lamb(table.parameters()).step()


def test_a_rate_in_a_tensor_is_used() -> None:
    moved = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        p = weights(torch.float64)[0]
        p.grad = gradients(0)[0]
        Lars([p], lr).step()  # type: ignore[arg-type]
        moved.append(p.detach())
    torch.testing.assert_close(moved[0], moved[1])
