"""The gated MLP in float8: as near to float64 as rounding to float8 lets it be, and the kernel as the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.blocks.kernels.against_float64 import name_of, on_device
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.float8_formats import FORWARD, GRADIENT, LARGEST_GRADIENT, step_of
from flatout.blocks.kernels.float8_gating import reference
from flatout.blocks.kernels.float8_gating import triton as on_units
from flatout.blocks.kernels.float8_gating.call import float8_gated_mlp
from flatout.core.errors import UsageError
from flatout.core.registry import kernels

_TRITON, _REFERENCE = kernels("float8_gating")


def _drawn(
    rows: int = 48, width: int = 32, hidden: int = 80, *, device: str = "cpu", dtype: torch.dtype
) -> list[Tensor]:
    """x, and the weights of gate, up and down, which are float32 as they are trained."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, rows // 3, width, generator=generator)
    weights = [
        torch.randn(*shape, generator=generator) / math.sqrt(shape[1])
        for shape in [(hidden, width)] * 2 + [(width, hidden)]
    ]
    return [t.requires_grad_() for t in (x.to(device, dtype), *(w.to(device) for w in weights))]


def _results(run: object, leaves: list[Tensor]) -> list[Tensor]:
    result = run(*leaves)  # type: ignore[operator]
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def _exact(leaves: list[Tensor]) -> list[Tensor]:
    def run(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    return _results(run, [t.detach().double().requires_grad_() for t in leaves])


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_the_error_is_that_of_rounding_to_float8(dtype: torch.dtype) -> None:
    leaves = _drawn(dtype=dtype)
    got = _results(float8_gated_mlp, leaves)
    for result, wanted, leaf in zip(got, _exact(leaves), [leaves[0], *leaves], strict=True):
        assert result.dtype == leaf.dtype and result.shape == wanted.shape
        assert 1e-3 < _error(result, wanted) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "hidden"), [(48, 80), (192, 128), (64, 64)])
def test_what_the_kernels_round_is_what_the_reference_rounds(rows: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, gate, up = (torch.randn(rows, hidden, generator=generator).bfloat16() for _ in range(3))
    _, scale = wanted_forward = reference._forward(gate, up)
    wanted = reference._backward(grad, gate, up, scale)
    with interpreted():
        got_forward, got = on_units._forward(gate, up), on_units._backward(grad, gate, up, scale)
    for a, b in zip([*got_forward, *got], [*wanted_forward, *wanted], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # On a device below 0.01; the interpreter loses the carry where rounding to float8 reaches the next power of two.
        assert _error(a.float(), b.float()) < 0.2
    torch.testing.assert_close(got_forward[1], scale)
    torch.testing.assert_close(got[-1], wanted[-1])
    for as_it_lies, exchanged in (got[0:2], got[2:4]):
        assert torch.equal(as_it_lies.float().t(), exchanged.float())


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "width"), [(48, 80), (128, 64)])
def test_a_gradient_is_rounded_in_both_orders(rows: int, width: int) -> None:
    grad = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = step_of(grad, GRADIENT)
    wanted = reference._rounded(grad, scale)
    with interpreted():
        got = on_units._rounded(grad, scale)
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in wanted]
    assert _error(got[0].float(), wanted[0].float()) < 0.2  # as above, of the interpreter
    assert torch.equal(got[0].float().t(), got[1].float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_not_lost(number: float) -> None:
    gate, up, grad = (torch.ones(64, 64).bfloat16() for _ in range(3))
    up[3, 5] = number
    with interpreted():
        values, scale = on_units._forward(gate, up)
        *_, gate_scale, up_scale = on_units._backward(grad, gate, up, scale)
    assert not torch.isfinite(scale) and not torch.isfinite(gate_scale) and torch.isfinite(up_scale)
    assert not torch.isfinite(values.float() * scale).all()


@pytest.mark.slow
def test_zeros_stay_zeros() -> None:
    zero, one = torch.zeros(64, 64).bfloat16(), torch.ones(64, 64).bfloat16()
    with interpreted():
        values, scale = on_units._forward(one, zero)
        results = on_units._backward(zero, one, zero, scale)
    assert scale > 0 and not values.float().any()
    assert (results[-1] > 0).all() and not any(t.float().any() for t in results[:5])


def test_no_gradient_is_made_that_nobody_needs() -> None:
    x, gate, up, down = _drawn(dtype=torch.float32)
    for frozen in (gate, up, down):
        frozen.requires_grad_(False)
    seen: list[torch.dtype] = []

    def product(a: object, b: object, dtype: torch.dtype) -> Tensor:
        seen.append(dtype)
        return reference._product(a, b, dtype)  # type: ignore[arg-type]

    passes = reference.Float8GatingPasses(product, reference._rounded, reference._forward, reference._backward)
    result = reference.gated_mlp(passes, x, gate, up, down)
    result.sum().backward()
    assert x.grad is not None and gate.grad is None
    assert len(seen) == 3 + 3


@pytest.mark.slow
def test_compiles_whole() -> None:
    leaves = _drawn(dtype=torch.bfloat16)

    def step(*leaves: Tensor) -> Tensor:
        return float8_gated_mlp(leaves[0].sin(), *leaves[1:])

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(_results(compiled, leaves), _results(step, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_gradient_is_refused() -> None:
    leaves = _drawn(dtype=torch.float32)
    [first] = torch.autograd.grad(float8_gated_mlp(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(UsageError, match="differentiated again"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ([(4, 32), (80, 32), (64, 32), (32, 80)], "are no gated MLP"),
        ([(4, 16), (80, 32), (80, 32), (32, 80)], "does not end in the 32 inputs"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        float8_gated_mlp(*map(torch.empty, shapes))


def test_sizes_and_dtypes_that_the_units_do_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_units, "no_triton", lambda *_: None)
    monkeypatch.setattr(on_units, "refusal", lambda _: None)
    shapes = [(16, 32), (80, 32), (80, 32), (32, 80)]
    fits = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    assert _TRITON.refusal(*fits) is None
    assert "12 is no multiple of 16" in str(_TRITON.refusal(fits[0][:12], *fits[1:]))
    assert "float32" in str(_TRITON.refusal(fits[0].float(), *fits[1:]))


@on_device
@pytest.mark.device
@pytest.mark.parametrize(("rows", "hidden"), [(48, 80), (192, 128), (3 * 1024, 8192)])
def test_on_a_device_the_kernel_returns_what_the_reference_does(rows: int, hidden: int) -> None:
    leaves = _drawn(rows, 256, hidden, device="cuda", dtype=torch.bfloat16)
    if (why := _TRITON.refusal(*leaves)) is not None:
        pytest.skip(why)
    got, wanted = (_results(k.run, leaves) for k in (_TRITON, _REFERENCE))
    for a, b, exact in zip(got, wanted, _exact(leaves), strict=True):
        assert a.dtype == b.dtype and _error(a, b) < 0.03 and _error(a, exact) < 0.12
    gate, up, grad = (torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    values, scale = on_units._forward(gate, up)
    results = on_units._backward(grad, gate, up, scale)
    for a, b in zip(
        [values, scale, *results],
        [*reference._forward(gate, up), *reference._backward(grad, gate, up, scale)],
        strict=True,
    ):
        assert _error(a.float(), b.float()) < 0.01
    assert torch.equal(results[0].float().t(), results[1].float())
    assert torch.equal(results[2].float().t(), results[3].float())
    twice, wanted_twice = (run(grad, step_of(grad, GRADIENT)) for run in (on_units._rounded, reference._rounded))
    assert torch.equal(twice[0].float().t(), twice[1].float())
    assert _error(twice[0].float(), wanted_twice[0].float()) < 0.01
    assert values.dtype == FORWARD and results[0].dtype == GRADIENT
    assert results[0].float().abs().max() == LARGEST_GRADIENT


@on_device
@pytest.mark.device
@pytest.mark.parametrize("options", [{}, {"coordinate_descent_tuning": True}], ids=["compiled", "tuned"])
def test_on_a_device_compiled_training_has_the_gradients_of_the_reference(options: dict[str, bool]) -> None:
    leaves = _drawn(3 * 1024, 512, 2048, device="cuda", dtype=torch.bfloat16)
    if (why := _TRITON.refusal(*leaves)) is not None:
        pytest.skip(why)

    def between(x: Tensor, *weights: Tensor) -> Tensor:
        """With neighbours, into which compiled code fuses what the passes leave to it."""
        return x + float8_gated_mlp(F.rms_norm(x, x.shape[-1:]), *weights).sin()

    compiled = torch.compile(between, options=options)
    for a, b in zip(_results(compiled, leaves), _results(between, leaves), strict=True):
        # Compiled neighbours round less often, so that other numbers of float8 come out; foreign bytes are errors of 1 and more.
        assert a.dtype == b.dtype and _error(a, b) < 0.15


@on_device
@pytest.mark.device
def test_on_a_device_the_host_waits_for_nothing() -> None:
    leaves = _drawn(48, 256, 512, device="cuda", dtype=torch.bfloat16)
    if (why := _TRITON.refusal(*leaves)) is not None:
        pytest.skip(why)
    float8_gated_mlp(*leaves).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        float8_gated_mlp(*leaves).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
