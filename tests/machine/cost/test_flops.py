"""Our formulas, from names and shapes alone, against torch's own counter on the operators that really run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flatout.core.errors import UsageError
from flatout.machine.cost import flops


class ShapeRecorder(TorchDispatchMode):
    """Sums operator_flop over every operator that is dispatched, from names and shapes of tensors only."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.flop = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
        outs = [result] if isinstance(result, Tensor) else result
        out_shapes = [tuple(value.shape) for value in outs if isinstance(value, Tensor)]
        flop = flops.operator_flop(str(func), shapes, out_shapes, is_transposed=self.is_transposed)
        if flop is not None:
            self.flop += flop
            self.names.append(flops.short_name(str(func)))
        return result


def both(run: Callable[[], object], *, is_transposed: bool = False) -> tuple[ShapeRecorder, int]:
    recorder = ShapeRecorder(is_transposed=is_transposed)
    with recorder:
        run()
    with FlopCounterMode(display=False) as counter:
        run()
    return recorder, counter.get_total_flops()


def tensor(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).requires_grad_()


def back(out: Tensor) -> None:
    out.backward(torch.ones_like(out))


PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: torch.mm(tensor(3, 5), tensor(5, 7)),
    "addmm": lambda: torch.addmm(tensor(7), tensor(3, 5), tensor(5, 7)),
    "bmm": lambda: torch.bmm(tensor(2, 3, 5), tensor(2, 5, 7)),
    "baddbmm": lambda: torch.baddbmm(tensor(2, 3, 7), tensor(2, 3, 5), tensor(2, 5, 7)),
    "linear": lambda: F.linear(tensor(4, 6, 5), tensor(7, 5), tensor(7)),
    "matmul": lambda: tensor(2, 1, 3, 5) @ tensor(4, 5, 7),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_agree_with_torch_forward_and_backward(name: str) -> None:
    recorder, expected = both(lambda: back(PRODUCTS[name]()))
    assert recorder.flop == expected > 0


CONVOLUTIONS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "1d": (lambda: F.conv1d(tensor(2, 3, 17), tensor(5, 3, 4)), False),
    "2d stride, padding, bias": (
        lambda: F.conv2d(tensor(2, 3, 17, 13), tensor(5, 3, 3, 2), tensor(5), stride=2, padding=1),
        False,
    ),
    "2d dilation": (lambda: F.conv2d(tensor(2, 3, 17, 13), tensor(5, 3, 3, 3), dilation=2), False),
    "3d": (lambda: F.conv3d(tensor(1, 2, 6, 7, 8), tensor(3, 2, 2, 2, 2)), False),
    "2d transposed": (lambda: F.conv_transpose2d(tensor(2, 3, 7, 6), tensor(3, 5, 3, 2), stride=2), True),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_agree_with_torch_forward_and_backward(name: str) -> None:
    make, is_transposed = CONVOLUTIONS[name]
    recorder, expected = both(lambda: back(make()), is_transposed=is_transposed)
    assert recorder.flop == expected > 0
    assert "convolution_backward" in recorder.names


def test_a_convolution_without_input_gradient_costs_two_forwards() -> None:
    x, weight = tensor(2, 3, 9, 9).detach(), tensor(5, 3, 3, 3)
    recorder, expected = both(lambda: back(F.conv2d(x, weight)))
    assert recorder.flop == expected == 2 * flops.convolution_flop((2, 3, 9, 9), (5, 3, 3, 3), (2, 5, 7, 7))


def test_groups_divide_every_part_of_a_convolution() -> None:
    def flop_with(groups: int) -> int:
        recorder = ShapeRecorder()
        with recorder:
            back(F.conv2d(tensor(2, 8, 9, 9), tensor(8, 8 // groups, 3, 3), groups=groups))
        return recorder.flop

    assert flop_with(1) == 4 * flop_with(4) == 8 * flop_with(8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_cpu_flash_attention_costs_what_its_products_cost(heads: int, kv_heads: int) -> None:
    def run(enable_gqa: bool) -> None:
        q, k, v = tensor(2, heads, 16, 8), tensor(2, kv_heads, 16, 8), tensor(2, kv_heads, 16, 8)
        back(F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa))

    recorder = ShapeRecorder()
    with recorder:
        run(kv_heads != heads)
    forward = 2 * 2 * heads * 16 * 16 * (8 + 8)
    if "_scaled_dot_product_flash_attention_for_cpu_backward" in recorder.names:
        assert recorder.flop == forward * 7 // 2  # two products forward, five backward
    else:  # the math path: as bmm, which keeps the scores and so recomputes nothing
        assert recorder.flop == 3 * forward


def test_fused_attention_agrees_with_the_products_that_it_fuses() -> None:
    q, k, v = (tensor(2, 4, 16, 8).detach() for _ in range(3))
    fused, unfused = ShapeRecorder(), ShapeRecorder()
    with fused:
        F.scaled_dot_product_attention(q, k, v)
    with unfused:
        (q @ k.transpose(-1, -2)).softmax(-1) @ v
    assert fused.names == ["_scaled_dot_product_flash_attention_for_cpu"]
    assert fused.flop == unfused.flop


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads", "v_dim"), [(16, 16, 4, 8), (16, 24, 4, 12), (16, 16, 2, 8)])
def test_gpu_attention_agrees_with_torch(kind: str, q_len: int, kv_len: int, kv_heads: int, v_dim: int) -> None:
    from torch.utils.flop_counter import flop_registry

    name = f"_scaled_dot_product_{kind}_attention"
    q, k, v = (2, 4, q_len, 8), (2, kv_heads, kv_len, 8), (2, kv_heads, kv_len, v_dim)
    grad_out = (2, 4, q_len, v_dim)
    forward = flop_registry[getattr(torch.ops.aten, name)]
    backward = flop_registry[getattr(torch.ops.aten, f"{name}_backward")]
    assert flops.operator_flop(f"aten.{name}.default", [q, k, v]) == forward(q, k, v, out_val=None)
    assert flops.operator_flop(f"aten::{name}_backward", [grad_out, q, k, v, grad_out]) == backward(
        grad_out, q, k, v, out_val=None
    )


def test_inner_attention_operators_have_length_before_heads() -> None:
    shape, inner = (2, 4, 16, 8), (2, 16, 4, 8)
    outer_flop = flops.operator_flop("_scaled_dot_product_flash_attention", [shape] * 3)
    assert flops.operator_flop("_flash_attention_forward", [inner] * 3) == outer_flop
    assert flops.operator_flop("_efficient_attention_forward", [inner] * 3) == outer_flop


def test_packed_sequences_are_unknown() -> None:
    packed = (64, 4, 8)
    assert flops.operator_flop("_flash_attention_forward", [packed] * 3 + [(5,), (5,)]) is None
    assert flops.operator_flop("_efficient_attention_forward", [(1, *packed)] * 3 + [(5,), (5,)]) is None


def test_a_model_agrees_with_torch_in_training_and_in_inference_mode() -> None:
    torch_model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    )
    x = tensor(4, 3, 8, 8).detach()
    recorder, expected = both(lambda: back(torch_model(x)))
    assert recorder.flop == expected > 0
    with torch.inference_mode():
        recorder, expected = both(lambda: torch_model(x))
    assert recorder.flop == expected > 0


def test_a_single_sample_counts_as_a_batch_of_one() -> None:
    x, weight, out = (3, 8, 8), (5, 3, 3, 3), (5, 6, 6)
    one = flops.operator_flop("aten.conv2d.default", [(1, *x), weight], [(1, *out)])
    assert flops.operator_flop("aten.conv2d.default", [x, weight], [out]) == one


def test_an_operator_without_formula_is_unknown() -> None:
    assert flops.operator_flop("aten.add.Tensor", [(3, 5), (3, 5)], [(3, 5)]) is None
    assert flops.operator_flop("mylib::thing", [], []) is None


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("mm", [(3, 5), (4, 7)]), ("mm", [(3, 5)]), ("bmm", [(3, 5), (5, 7)]), ("convolution", [(1, 3, 8, 8)])],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match=f"do not fit '{name}'"):
        flops.operator_flop(name, shapes, [])


# ------------------------------------------------------------------------------------------------------ recurrent layers


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("is_backward", [False, True])
def test_recurrent_layers_count_each_matrix_once_a_position(kind: type[torch.nn.RNNBase], is_backward: bool) -> None:
    steps, batch, width, hidden, layers = 6, 4, 5, 8, 2
    layer, x = kind(width, hidden, layers), tensor(steps, batch, width)
    with ShapeRecorder() as recorder:
        out, _ = layer(x)
        if is_backward:
            back(out)
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    forward = 2 * steps * batch * matrices
    # some kernels leave out the gradient of the first state, which is constant: one product with each hidden matrix
    state = 2 * batch * sum(p.numel() for n, p in layer.named_parameters() if n.startswith("weight_hh"))
    assert (
        forward * (3 if is_backward else 1) - state * is_backward
        <= recorder.flop
        <= forward * (3 if is_backward else 1)
    )


def test_cudnns_layers_count_from_their_shapes() -> None:
    """A bidirectional layer of 3 to 4 numbers, then one of 8 to 4, as cuDNN is called: weights of all before the states."""
    first = [(16, 3), (16, 4), (16,), (16,)]
    second = [(16, 8), (16, 4), (16,), (16,)]
    weights = [*first, *first, *second, *second]
    matrices = 2 * (16 * 3 + 16 * 4) + 2 * (16 * 8 + 16 * 4)
    padded = [(5, 2, 3), *weights, (960,), (4, 2, 4), (4, 2, 4)]
    packed = [(7, 3), *weights, (960,), (4, 2, 4), (4, 2, 4), (7, 8), (7, 8)]
    assert flops.operator_flop("aten._cudnn_rnn", padded) == 2 * 5 * 2 * matrices
    assert flops.operator_flop("aten._cudnn_rnn_backward", packed) == 2 * 2 * 7 * matrices
