from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatout
from flatout.blocks.kernels import Linear
from flatout.blocks.kernels.matmul import Packed, dispatch, matmul, matmul_selection, measure_matmul, plain_problem
from flatout.core.errors import UsageError


def _random(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), **options)


def test_more_dimensions_and_all_that_may_follow_are_right() -> None:
    a, b, bias, residual = _random(2, 3, 5, 8), _random(8, 6), _random(6), _random(2, 3, 5, 6)
    out = flatout.matmul(a, b, bias=bias, activation="silu", residual=residual)
    torch.testing.assert_close(out, (F.silu(a.double() @ b.double() + bias) + residual).float())
    assert out.is_contiguous()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_operands_that_lie_in_no_piece_are_copied(requires_grad: bool) -> None:
    a, b = _random(6, 16)[::2, ::2].requires_grad_(requires_grad), _random(16, 12)[::2, ::3]
    bias, residual = _random(8)[::2], _random(6, 8)[::2, ::2]
    for _ in range(2):  # the second call finds the runner of the first
        out = matmul(a, b, bias=bias, residual=residual)
        torch.testing.assert_close(out, a @ b + bias + residual)


def test_a_call_like_an_earlier_one_does_not_take_its_numbers() -> None:
    b = _random(8, 8)
    for packed, wanted in ((Packed(b), b), (Packed(b, is_transposed=True), b.T), (b, b), (b.T, b.T)):
        a = _random(3, 8)
        assert torch.equal(matmul(a, packed), a @ wanted)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
def test_gradients_are_those_of_the_formula(activation: Any) -> None:
    a, b = _random(4, 5, dtype=torch.float64), _random(5, 3, dtype=torch.float64)
    bias, residual = _random(3, dtype=torch.float64), _random(4, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (a, b, bias, residual)]
    assert torch.autograd.gradcheck(
        lambda a, b, bias, residual: matmul(a, b, bias=bias, residual=residual, activation=activation), leaves
    )


def test_gradients_can_be_differentiated_again() -> None:
    a, b = _random(4, 5, dtype=torch.float64).requires_grad_(), _random(5, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(matmul, (a, b))


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    a, b = _random(4, 5), _random(5, 3).requires_grad_()
    matmul(a, b).sum().backward()
    assert a.grad is None
    torch.testing.assert_close(b.grad, a.T @ torch.ones(4, 3))


def test_the_gradient_of_a_result_of_eight_bits_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no gradient; detach"):
        matmul(_random(4, 5).requires_grad_(), _random(5, 3), out_dtype=torch.int8)


def test_autocast_casts_as_torch_does() -> None:
    a, b = _random(4, 16), _random(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = matmul(a, b)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, a @ b)
    assert matmul(a, b).dtype == torch.float32


@pytest.mark.parametrize(
    "a, b, asked, words",
    [
        (torch.ones(3), torch.ones(3, 2), {}, "give \\(..., M, K\\)"),
        (torch.ones(2, 3), torch.ones(4, 2), {}, "cannot multiply \\(2, 3\\) and \\(4, 2\\)"),
        (torch.ones(2, 3), torch.ones(3, 2).double(), {}, "both must be of one type"),
        (torch.ones(2, 3).int(), torch.ones(3, 2).int(), {}, "of floating-point numbers"),
        (torch.ones(2, 3), torch.ones(3, 2), {"bias": torch.ones(3)}, "bias is \\(3,\\); give \\(2,\\)"),
        (torch.ones(2, 3), torch.ones(3, 2), {"activation": "tanh"}, "activation 'tanh' is not known"),
        (torch.ones(2, 3), torch.ones(3, 2), {"precision": "tf32"}, "precision 'tf32' is not known"),
        (torch.ones(2, 3), torch.ones(3, 2), {"scale": torch.ones(5)}, "scale is \\(5,\\)"),
        (torch.ones(2, 3), torch.ones(3, 2), {"scale": torch.ones(()).half()}, "scale is float16; give float32"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_value(a: Any, b: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        matmul(a, b, **asked)


def test_the_selection_has_its_reason() -> None:
    a, b = _random(4, 5), _random(5, 3)
    assert matmul_selection(a, b).because.startswith("not measured")
    measure_matmul(plain_problem(4, 3, 5, dtype=torch.float32, device="cpu"))
    assert matmul_selection(a, b).because.startswith("measured")


def test_float32_accuracy_on_a_cpu_is_float32() -> None:
    a, b = _random(4, 5), _random(5, 3)
    assert torch.equal(matmul(a, b, precision="float32"), a @ b)


# -- the layer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 16), (16,)])
def test_a_layer_returns_what_the_original_layer_returns(shape: tuple[int, ...], has_bias: bool) -> None:
    layer = nn.Linear(16, 5, bias=has_bias)
    fast, x = Linear.from_linear(layer), _random(*shape)
    torch.testing.assert_close(fast(x), layer(x))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x))


def test_a_layer_shares_the_parameters_and_has_the_same_state() -> None:
    layer = nn.Linear(16, 5)
    fast = Linear.from_linear(layer)
    assert list(fast.state_dict()) == list(layer.state_dict())
    assert fast.weight is layer.weight
    fast.load_state_dict(nn.Linear(16, 5).state_dict())
    torch.testing.assert_close(fast(_random(3, 16)), layer(_random(3, 16)))


@pytest.mark.slow
def test_a_layer_with_a_packed_weight_follows_the_optimizer() -> None:
    layer, x = nn.Linear(64, 48), _random(8, 64)
    fast = Linear.from_linear(layer)
    measure_matmul(plain_problem(8, 48, 64, dtype=torch.float32, device="cpu", layout="nt", is_constant=True))
    with torch.no_grad():
        dispatch._bound.clear()
        from flatout.blocks.kernels.matmul import onednn as prepacked

        run = prepacked.bind(plain_problem(8, 48, 64, dtype=torch.float32, device="cpu", layout="nt", is_constant=True))
        packed = Packed(layer.weight, is_transposed=True)
        torch.testing.assert_close(run(x, packed, None, None, None), x @ layer.weight.T)
        assert packed.extra_bytes >= 48 * 64 * 4
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(run(x, packed, None, None, None), x @ layer.weight.T)
        torch.testing.assert_close(fast(x), F.linear(x, layer.weight, layer.bias))


def test_a_layer_can_be_copied_pickled_and_compiled() -> None:
    fast, x = Linear.from_linear(nn.Linear(16, 5), activation="gelu"), _random(3, 16)
    wanted = fast(x)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(x), wanted)
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), wanted)


def test_a_layer_of_another_class_is_refused() -> None:
    class Scaled(nn.Linear):
        pass

    with pytest.raises(UsageError, match=r"Scaled is not nn\.Linear itself"):
        Linear.from_linear(Scaled(3, 2))
