"""flatout's own kernel: products, convolutions and recurrent layers against float64."""

from __future__ import annotations

import copy
import ctypes
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import kernel
from flatout.shrink.quantise.affine import Affine, for_range, grouped, per_channel
from flatout.shrink.quantise.layers import GROUP, FewBits, FewBitsCell, FewBitsConv, FewBitsLayers

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the kernel is compiled here: no C compiler"
)
ERRORS = {(8, 2): 0.006, (8, 1): 0.012, (4, 2): 0.1, (4, 1): 0.1}
"""Of a product's outputs, relative, with normal weights and activations: half a step of the weights, and of activations."""


@pytest.fixture(autouse=True)
def no_gradient() -> object:
    with torch.inference_mode():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(num_in: int, num_out: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(num_in, num_out, bias=bias)
    layer.weight.copy_(numbers(num_out, num_in, seed=seed) / num_in**0.5)
    return layer


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33, 130])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (3, 17), (64, 64), (200, 75), (129, 130)])
def test_a_product_is_as_close_as_its_bits(bits: int, terms: int, rows: int, num_in: int, num_out: int) -> None:
    layer, x = linear(num_in, num_out), numbers(rows, num_in, seed=1)
    found = FewBits(layer.weight, layer.bias, bits=bits, terms=terms)(x)
    assert found.shape == (rows, num_out)
    assert off(found, layer(x)) < ERRORS[bits, terms] * 1.5


@given(st.integers(1, 9), st.integers(1, 80), st.integers(1, 40), st.integers(0, 1000))
def test_whole_numbers_are_multiplied_exactly(rows: int, num_in: int, num_out: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (num_out, num_in), generator=source).float()
    weight[:, 0] = 127  # so that each output's step is 1
    x = torch.randint(-127, 128, (rows, num_in), generator=source).float()
    x[:, 0] = 127
    wanted = (x.double() @ weight.double().t()).float()
    for terms in (1, 2):
        found = FewBits(weight, None, bits=8, terms=terms)(x)
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-3)


def test_weights_alone_are_rounded_with_two_terms() -> None:
    layer, x = linear(256, 64, bias=False), numbers(5, 256, seed=1)
    rounded = per_channel(layer.weight).fake_quantise(layer.weight)
    found = FewBits(layer.weight, None, bits=8, terms=2)(x)
    assert off(found, x.double() @ rounded.double().t()) < 1e-4


def test_four_bits_are_what_their_numbers_say() -> None:
    weight = torch.randint(-8, 8, (20, 2 * GROUP), generator=torch.Generator().manual_seed(0)).float()
    weight[:, ::GROUP] = -8
    x = numbers(3, 2 * GROUP, seed=1)
    assert off(FewBits(weight, None, bits=4, terms=2)(x), x @ weight.t()) < 1e-4


def test_packed_numbers_can_be_read_back() -> None:
    whole = torch.randint(-8, 8, (5, 70), generator=torch.Generator().manual_seed(0))
    eight = kernel.packed8(whole).transpose(1, 2).reshape(16, -1)[:5, :70].int() - 128
    four = kernel.packed4(whole, group=GROUP)
    both = torch.stack((four & 15, four >> 4), 2).permute(0, 3, 1, 2, 4).reshape(16, -1)[:5, :70].int() - 8
    assert torch.equal(eight, whole.int())
    assert torch.equal(both, whole.int())
    assert grouped(whole.float(), group=GROUP).shape == (5, 2, GROUP)


def test_threads_change_no_bit() -> None:
    layer, x = linear(512, 640), numbers(19, 512, seed=1)
    few = FewBits(layer.weight, layer.bias, bits=8, terms=2)
    before = torch.get_num_threads()
    found = []
    for num in (1, 2, 3):
        torch.set_num_threads(num)
        found.append(few(x))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_row_is_the_same_alone_and_among_others() -> None:
    layer, x = linear(100, 50), numbers(9, 100, seed=1)
    few = FewBits(layer.weight, layer.bias, bits=8, terms=1)
    assert torch.equal(few(x), torch.cat([few(row[None]) for row in x]))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_with_nan_or_infinity_gives_nan_and_spares_the_others(odd: float, terms: int) -> None:
    layer, x = linear(40, 20), numbers(3, 40, seed=1)
    x[1, 7] = odd
    found = FewBits(layer.weight, layer.bias, bits=8, terms=terms)(x)
    assert bool(found[1].isnan().all())
    assert bool(found[::2].isfinite().all())


def test_rows_of_zeros_give_the_bias() -> None:
    layer = linear(40, 20)
    assert torch.equal(FewBits(layer.weight, layer.bias, bits=8, terms=2)(torch.zeros(2, 40))[1], layer.bias)


def test_a_scale_seen_beforehand_is_used_with_its_zero() -> None:
    layer, x = linear(64, 32), numbers(5, 64, seed=1).relu()
    input_ranges = for_range(x.min(), x.max(), symmetric=False)
    found = FewBits(layer.weight, layer.bias, bits=8, terms=1, inputs=input_ranges)(x)
    assert float(input_ranges.zero) != 0
    assert (
        off(
            found,
            nn.functional.linear(
                input_ranges.fake_quantise(x), per_channel(layer.weight).fake_quantise(layer.weight), layer.bias
            ),
        )
        < 1e-5
    )


def test_any_shape_before_the_last_is_kept_and_memory_need_not_be_contiguous() -> None:
    layer, x = linear(24, 10), numbers(24, 3, 5, seed=1).permute(2, 1, 0)
    few = FewBits(layer.weight, layer.bias, bits=8, terms=2)
    assert torch.equal(few(x), few(x.contiguous()))
    assert few(x[0, 0]).shape == (10,)
    assert few(torch.empty(0, 24)).shape == (0, 10)


def test_a_copy_and_a_loaded_state_call_with_their_own_weights() -> None:
    one, other, x = linear(24, 10), linear(24, 10, seed=5), numbers(2, 24, seed=1)
    few = FewBits(one.weight, one.bias, bits=8, terms=2)
    few(x)
    second = copy.deepcopy(few)
    second(x)
    second.load_state_dict(FewBits(other.weight, other.bias, bits=8, terms=2).state_dict(), assign=True)
    assert off(second(x), other(x)) < 0.01
    assert off(few(x), one(x)) < 0.01


@pytest.mark.parametrize("x", [torch.zeros(2, 23), torch.zeros(2, 24, dtype=torch.float64)])
def test_inputs_that_it_cannot_take_are_refused(x: Tensor) -> None:
    layer = linear(24, 10)
    with pytest.raises(UsageError, match="takes float32"):
        FewBits(layer.weight, layer.bias, bits=8, terms=2)(x)


def test_an_input_that_asks_for_a_gradient_is_refused() -> None:
    layer = linear(24, 10)
    few = FewBits(layer.weight, layer.bias, bits=8, terms=2)
    with torch.inference_mode(False), pytest.raises(UsageError, match="no gradient"):
        few(torch.zeros(1, 24, requires_grad=True))


def test_a_layer_that_was_cast_is_refused() -> None:
    layer = linear(24, 10)
    with pytest.raises(UsageError, match="moved or cast"):
        FewBits(layer.weight, layer.bias, bits=8, terms=2).half()(torch.zeros(1, 24))


def test_too_many_inputs_for_whole_sums_are_refused() -> None:
    with pytest.raises(UsageError, match="sums in whole numbers"):
        FewBits(torch.zeros(1, kernel.MOST_INPUTS + 1), None, bits=8, terms=1)


def test_sums_at_the_most_inputs_do_not_overflow() -> None:
    x = torch.ones(1, kernel.MOST_INPUTS)
    assert FewBits(x, None, bits=8, terms=1)(x).item() == pytest.approx(kernel.MOST_INPUTS, rel=1e-6)


CONVS: list[tuple[Callable[[], nn.Conv1d | nn.Conv2d], tuple[int, ...]]] = [
    (lambda: nn.Conv2d(6, 10, 3, padding=1), (2, 6, 9, 7)),
    (lambda: nn.Conv2d(6, 10, (3, 1), stride=(2, 1), dilation=2, bias=False), (2, 6, 9, 7)),
    (lambda: nn.Conv2d(6, 10, 1), (6, 5, 4)),
    (lambda: nn.Conv2d(6, 10, 1, stride=2, padding=1), (1, 6, 5, 4)),
    (lambda: nn.Conv1d(6, 10, 3, dilation=2, padding=2), (2, 6, 12)),
    (lambda: nn.Conv1d(6, 10, 1), (6, 12)),
]


@pytest.mark.parametrize(("make", "shape"), CONVS)
def test_a_convolution_is_as_close_as_its_bits(make: Callable[[], nn.Conv2d], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv, x = make(), numbers(*shape)
    wanted, found = conv(x), FewBitsConv(conv, bits=8, terms=2)(x)
    assert found.shape == wanted.shape
    assert off(found, wanted) < 0.01


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, padding="same")])
def test_convolutions_that_are_no_single_product_are_refused(conv: nn.Conv2d) -> None:
    with pytest.raises(UsageError, match="ungrouped"):
        FewBitsConv(conv, bits=8, terms=1)


def parts(found: object) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for part in found for t in parts(part)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("shape", [(3, 12), (12,)])
def test_a_cell_follows_the_float_cell(kind: type[nn.LSTMCell], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cell = kind(12, 40)
    few, x = FewBitsCell(cell, terms=2), numbers(*shape)
    exact = state = None
    for _ in range(3):
        exact, state = cell(x, exact), few(x, state)
    for found, wanted in zip(parts(state), parts(exact), strict=True):
        assert found.shape == wanted.shape
        assert off(found, wanted) < 0.01


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "how",
    [{}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False, "num_layers": 2}],
    ids=str,
)
@pytest.mark.parametrize("has_state", [True, False])
def test_layers_follow_the_float_layers(kind: type[nn.LSTM], how: dict[str, int], has_state: bool) -> None:
    torch.manual_seed(0)
    layers = kind(12, 20, **how).eval()
    x, num = numbers(4, 5, 12), layers.num_layers * (2 if layers.bidirectional else 1)
    h = numbers(num, 4 if layers.batch_first else 5, 20, seed=2)
    state = None if not has_state else (h, h.flip(0)) if kind is nn.LSTM else h
    found, wanted = FewBitsLayers(layers, terms=2)(x, state), layers(x, state)
    for one, other in zip(parts(found), parts(wanted), strict=True):
        assert one.shape == other.shape
        assert off(one, other) < 0.01


def test_layers_take_a_single_sequence_and_leave_the_state_as_it_was() -> None:
    torch.manual_seed(0)
    layers, x, h = nn.GRU(12, 20).eval(), numbers(4, 12), numbers(1, 20)
    before = h.clone()
    found, wanted = FewBitsLayers(layers, terms=2)(x, h), layers(x, h)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert off(found[0], wanted[0]) < 0.01
    assert torch.equal(h, before)


def test_packed_sequences_and_wrong_states_are_refused() -> None:
    few = FewBitsLayers(nn.GRU(12, 20).eval(), terms=2)
    with pytest.raises(UsageError, match="packed"):
        few(nn.utils.rnn.pack_sequence([torch.zeros(3, 12)]))
    with pytest.raises(UsageError, match="state must be"):
        few(torch.zeros(3, 2, 12), torch.zeros(1, 3, 20))


def test_gates_keep_nan_and_saturate() -> None:
    cell = nn.LSTMCell(4, 20)
    few = FewBitsCell(cell, terms=2)
    far = few(torch.zeros(1, 4), (torch.zeros(1, 20), torch.full((1, 20), 1e4)))
    assert bool(far[0].isfinite().all())
    assert bool(few(torch.full((1, 4), float("nan")))[0].isnan().all())


def test_the_structure_is_as_large_as_in_c() -> None:
    assert ctypes.sizeof(kernel.FewBitsWeights) == 3 * 8 + 4 * 8 + 2 * 4


def test_affine_of_static_activations_needs_eight_bits() -> None:
    input_ranges = Affine(torch.tensor(1.0), torch.tensor(0.0), -128, 127)
    with pytest.raises(UsageError, match="one term"):
        FewBits(torch.zeros(2, 2), None, bits=8, terms=2, inputs=input_ranges)
