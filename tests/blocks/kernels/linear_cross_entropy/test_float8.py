from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.blocks.kernels.against_float64 import name_of, on_device
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.float8_formats import float8_of, gradient_step
from flatout.blocks.kernels.linear_cross_entropy.call import linear_cross_entropy
from flatout.core.errors import UsageError
from flatout.core.registry import kernels

_TRITON, _REFERENCE = kernels("linear_cross_entropy.float8")
_OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk": 16},
    {"label_smoothing": 0.1, "chunk": 16},
    {"softcap": 5.0},
    {"z_loss": 1e-2},
    {"reduction": "sum"},
    {"reduction": "none", "chunk": 32},
    {"ignore_index": 3},
    {"bias": True, "chunk": 16},
]


def _drawn(
    *,
    tokens: int = 45,
    width: int = 32,
    vocabulary: int = 200,
    bias: bool = False,
    device: str = "cpu",
    by: float = 1.0,
) -> tuple[list[Tensor | None], Tensor]:
    """Hidden, weight and bias, and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator) * by
    weight = torch.randn(vocabulary, width, generator=generator) * 0.2
    shift = torch.randn(vocabulary, generator=generator) if bias else None
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[1] = targets[tokens - 1] = -100
    leaves = [t.to(device).requires_grad_() if t is not None else None for t in (hidden, weight, shift)]
    return leaves, targets.to(device)


def _results(leaves: list[Tensor | None], targets: Tensor, options: dict[str, Any], run: Any) -> list[Tensor]:
    hidden, weight, bias = leaves
    own = {k: v for k, v in options.items() if k != "bias"}
    own.setdefault("ignore_index", -100)
    loss = run(hidden, weight, targets.where(targets != -100, own["ignore_index"]), bias, **own)
    generator = torch.Generator().manual_seed(1)
    grad = torch.rand(loss.shape, generator=generator).to(loss)
    return [loss.detach(), *torch.autograd.grad(loss, [t for t in leaves if t is not None], grad)]


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def _exact(leaves: list[Tensor | None], targets: Tensor, options: dict[str, Any]) -> list[Tensor]:
    wide = [t.detach().double().requires_grad_() if t is not None else None for t in leaves]
    return _results(wide, targets, options, kernels("linear_cross_entropy")[-1].run)


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_the_error_is_that_of_rounding_to_float8(options: dict[str, Any]) -> None:
    leaves, targets = _drawn(bias=options.get("bias", False))
    got = _results(leaves, targets, options, lambda *a, **k: linear_cross_entropy(*a, **k, float8=True))
    for number, (a, b) in enumerate(zip(got, _exact(leaves, targets, options), strict=True)):
        assert a.dtype == torch.float32
        assert 1e-5 < _error(a, b) < (0.02 if number == 0 else 0.12)


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.slow
def test_the_kernel_returns_what_the_reference_does(options: dict[str, Any]) -> None:
    leaves, targets = _drawn(bias=options.get("bias", False))
    wanted = _results(leaves, targets, options, _REFERENCE.run)
    with interpreted():
        got = _results(leaves, targets, options, _TRITON.run)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        # On a device below 0.01; the interpreter loses the carry where rounding to float8 reaches the next power of two.
        assert _error(a, b) < 0.2


@on_device
@pytest.mark.device
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_the_kernel_returns_what_the_reference_does_on_a_device(options: dict[str, Any], dtype: torch.dtype) -> None:
    if (why := _TRITON.refusal(torch.empty(16, 16, device="cuda"), torch.empty(16, 16, device="cuda"))) is not None:
        pytest.skip(why)
    leaves, targets = _drawn(tokens=700, width=256, vocabulary=50257, bias=options.get("bias", False), device="cuda")
    leaves = [t.detach().to(dtype).requires_grad_() if t is not None else None for t in leaves]
    more = {**options, "chunk": 256} if "chunk" in options else options
    wanted = _results(leaves, targets, more, _REFERENCE.run)
    got = _results(leaves, targets, more, _TRITON.run)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert _error(a, b) < 0.02  # logits and the gradient of hidden leave the units in 16 bits
    for number, (a, b) in enumerate(zip(got, _exact(leaves, targets, more), strict=True)):
        assert _error(a, b) < (0.02 if number == 0 else 0.12)


@on_device
@pytest.mark.device
def test_the_host_waits_for_nothing_on_a_device() -> None:
    leaves, targets = _drawn(device="cuda")
    hidden, weight, _ = leaves
    linear_cross_entropy(hidden, weight, targets, float8=True).backward()  # type: ignore[arg-type]
    try:
        torch.cuda.set_sync_debug_mode("error")
        linear_cross_entropy(hidden, weight, targets, float8=True, chunk=16).backward()  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_of_any_size_are_rounded_alike() -> None:
    """One scale for a matrix: as many bits for numbers near 1e-6 as near 1e6."""
    leaves, targets = _drawn()
    hidden, weight, _ = leaves
    losses = [
        linear_cross_entropy(hidden.detach() * by, weight.detach() / by, targets, float8=True)  # type: ignore[union-attr]
        for by in (1.0, 2.0**20, 2.0**-20)
    ]
    torch.testing.assert_close(losses[1:], [losses[0]] * 2)


def test_probabilities_of_a_large_vocabulary_are_not_lost() -> None:
    """1 / 200,000 over 4,096 tokens is 1.2e-9, where e5m2 ends at 1.5e-5."""
    scales = torch.full((4096,), 1 / 4096)
    step = gradient_step(scales)
    share = torch.tensor(1 / 4096 / 200_000)
    small = (share / step).to(torch.float8_e5m2).float() * step
    assert abs(small / share - 1) < 0.125
    assert float(1 / 4096 / step) <= torch.finfo(torch.float8_e5m2).max


def test_a_matrix_of_zeros_stays_one() -> None:
    values, scale = float8_of(torch.zeros(3, 16))
    assert not values.float().any()
    assert float(scale) > 0


def test_what_is_not_finite_shows() -> None:
    leaves, targets = _drawn()
    hidden, weight, _ = leaves
    assert hidden is not None and weight is not None
    with torch.no_grad():
        hidden[3, 3] = float("inf")
    assert linear_cross_entropy(hidden, weight, targets, float8=True).isnan()


def test_autocast_and_evaluation_take_it_too() -> None:
    leaves, targets = _drawn()
    hidden, weight, _ = leaves
    assert hidden is not None and weight is not None
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, float8=True)
    assert loss.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, float8=True), loss)


@pytest.mark.slow
def test_compiles_whole_with_float8() -> None:
    leaves, targets = _drawn()
    hidden, weight, _ = leaves

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(hidden.tanh(), weight, targets, float8=True)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    made = [(loss, *torch.autograd.grad(loss, [hidden, weight])) for loss in (  # type: ignore[list-item]
        step(hidden, weight, targets), compiled(hidden, weight, targets)  # type: ignore[arg-type]
    )]  # fmt: skip
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


def test_a_kernel_of_other_products_is_refused() -> None:
    leaves, targets = _drawn()
    hidden, weight, _ = leaves
    with pytest.raises(UsageError, match="does not implement"):
        linear_cross_entropy(hidden, weight, targets, float8=True, kernel="linear_cross_entropy.chunked")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is on 'cpu'"):
        linear_cross_entropy(hidden, weight, targets, float8=True, kernel="linear_cross_entropy.float8.triton")  # type: ignore[arg-type]
