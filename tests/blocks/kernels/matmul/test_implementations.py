"""Every implementation of a product against float64, the Triton ones in the interpreter."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.blocks.kernels.against_float64 import (
    Call,
    Case,
    assert_no_worse_than_reference,
    drawn,
    name_of,
    on_cpu,
    on_device,
    on_devices,
    skip_what_cannot_run,
)
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.matmul import float16x3
from flatout.blocks.kernels.matmul import triton as tiled
from flatout.blocks.kernels.matmul.implementation import MatmulKernel
from flatout.blocks.kernels.matmul.packing import Packed
from flatout.blocks.kernels.matmul.problem import matmul_problem
from flatout.blocks.kernels.matmul.reference import multiplied
from flatout.blocks.kernels.matmul.variant import Loads, Tile, Variant
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

LAYOUTS = ("nn", "nt", "tn", "tt")


def _operands(generator: torch.Generator, m: int, n: int, k: int, layout: str) -> tuple[Tensor, Tensor]:
    a = drawn(generator, m, k) if layout[0] == "n" else drawn(generator, k, m).detach().T.requires_grad_()
    b = drawn(generator, k, n) if layout[1] == "n" else drawn(generator, n, k).detach().T.requires_grad_()
    return a, b


def _case(name: str, m: int, n: int, k: int, layout: str = "nn", *sides: str, **options: Any) -> Case:
    def make(generator: torch.Generator) -> Call:
        bias = drawn(generator, n) if "bias" in sides else None
        residual = drawn(generator, m, n) if "residual" in sides else None
        return Call((*_operands(generator, m, n, k, layout), bias, residual), options)

    return Case(name, make)


CASES = [
    *(_case(f"{layout}, nothing divides", 37, 41, 53, layout) for layout in LAYOUTS),
    *(_case(f"{layout}, all divides", 32, 64, 64, layout) for layout in LAYOUTS),
    _case("one row", 1, 48, 72),
    _case("one column", 20, 1, 40),
    _case("a depth of one", 20, 24, 1),
    _case("deep", 8, 8, 700),
    _case("bias and relu", 30, 40, 24, "nt", "bias", activation="relu"),
    _case("bias, gelu and residual", 30, 40, 24, "nt", "bias", "residual", activation="gelu"),
    _case("silu", 30, 40, 24, activation="silu"),
    _case("gelu by tanh", 30, 40, 24, activation="gelu_tanh"),
    _case("residual alone", 17, 19, 24, "nt", "residual"),
    _case("no rows", 0, 8, 8),
]


def _refused(kernel: Kernel, case: Case) -> str | None:
    return "the kernel refuses it" if kernel.id == "matmul.triton" and case.name == "no rows" else None


def _is_slow(kernel: Kernel) -> bool:
    return isinstance(kernel, MatmulKernel) and kernel.is_slow_to_compile


def _marked_slow(calls: list[Any]) -> list[Any]:
    """Of a kernel that takes long to compile one call stands for all, and not in the fast suite."""
    slow = [call for call in calls if _is_slow(call[0])]
    one = [call for call in slow if call[1].name == "bias, gelu and residual" and call[2] == torch.float32]
    return [call for call in calls if call not in slow] + [pytest.param(*call, marks=pytest.mark.slow) for call in one]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("kernel", "case", "dtype"), _marked_slow(on_cpu("matmul", CASES, refused=_refused)), ids=name_of
)
def test_no_worse_than_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels("matmul")[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(("kernel", "case", "dtype"), _marked_slow(on_devices("matmul", CASES)), ids=name_of)
def test_no_worse_than_reference_on_device(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    assert_no_worse_than_reference(kernel, kernels("matmul")[-1], case, dtype, "cuda")


def _error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("splits, is_persistent, is_packed", [(1, False, True), (1, True, False), (4, False, False)])
@pytest.mark.parametrize("loads", ["descriptor", "aligned", "pointer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_computes_the_product(
    layout: str, loads: Loads, splits: int, is_persistent: bool, is_packed: bool
) -> None:
    a, b = (x.detach().half() for x in _operands(torch.Generator().manual_seed(0), 20, 41, 100, layout))
    bias, residual = torch.ones(41).half(), torch.ones(20, 41).half()
    sides = {"bias": bias, "activation": "gelu", "residual": residual}
    tile = Tile(m=16, n=32, k=32, stages=2, warps=4, splits=splits, loads=loads, is_persistent=is_persistent)
    problem = matmul_problem(a, b, is_constant=is_packed, **sides)
    exact = multiplied(a.double(), b.double(), bias.double(), residual.double(), activation="gelu")
    with interpreted():
        run = tiled.bind(problem, tile)
        outs = [run(a, Packed(b) if is_packed else b, bias, residual, None) for _ in range(2)]
    eager = multiplied(a, b, bias, residual, activation="gelu")
    assert _error(outs[0], exact) <= 2 * _error(eager, exact)
    assert torch.equal(outs[0], outs[1])
    assert outs[0].stride() == eager.stride()


def test_operands_that_begin_anywhere_take_another_launch_and_give_the_same() -> None:
    a, whole = torch.randn(16, 32).half(), torch.randn(32 * 48 + 1).half()
    b = whole[1:].view(32, 48)
    assert b.data_ptr() % 16
    tile = Tile(m=16, n=16, k=32, stages=2, warps=4, loads="pointer")
    with interpreted():
        run = tiled.bind(matmul_problem(a, b), tile)
        out, again = run(a, b, None, None, None), run(a, b.clone(), None, None, None)
    assert torch.equal(out, again)


@pytest.mark.parametrize("by", [torch.tensor(3.0), torch.arange(1.0, 11.0)], ids=["one number", "one a row"])
def test_quantised_results_saturate_and_round_as_the_reference(by: Tensor) -> None:
    a, b = torch.randn(10, 24).half(), torch.randn(24, 40).half()
    asked: dict[str, Any] = {"scale": by * 4, "out_dtype": torch.int8}
    tile = Tile(m=16, n=16, k=32, stages=2, warps=4)
    with interpreted():
        out = tiled.bind(matmul_problem(a, b, **asked), tile)(a, b, None, None, asked["scale"])
    exact = (a.double() @ b.double()) * (by * 4).reshape(-1, 1).double()
    assert out.dtype == torch.int8
    assert int((exact.abs() > 127).sum()) > 0
    assert float((out.double() - exact.clamp(-127, 127)).abs().max()) <= 0.5 + 1e-3  # half a step, and float32's sum
    assert float((multiplied(a, b, **asked).double() - out.double()).abs().max()) <= 1


def test_nan_stays_nan_through_relu_and_saturation() -> None:
    a, b = torch.randn(16, 16).half(), torch.randn(16, 16).half()
    a[3, 4] = float("nan")
    with interpreted():
        tile = Tile(m=16, n=16, k=16, stages=2, warps=4)
        out = tiled.bind(matmul_problem(a, b, activation="relu"), tile)(a, b, None, None, None)
    assert torch.equal(out.isnan(), (a @ b).isnan())


# -- float32 from coarser types ------------------------------------------------------------------------------------------------

HALVES = Variant(name="float16x3", tile=Tile(m=32, n=32, k=32, stages=2, warps=4))


def _numbers(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "uniform":
        return torch.rand(shape, generator=generator)
    x = torch.randn(shape, generator=generator)
    by = {"normal": 1.0, "huge": 1e18, "small": 1e-30}
    if kind in by:
        return x * by[kind]
    if kind == "sparse":
        return x.where(torch.rand(shape, generator=generator) < 0.1, 0.0)
    return torch.exp(8 * x) * x.roll(1).sign()  # wide


def _run_halves(a: Tensor, b: Tensor, **asked: Any) -> Tensor:
    problem = matmul_problem(a, b, precision="float32", **asked)
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities that a device makes without a word
        return float16x3.bind(problem, HALVES)(a, b, asked.get("bias"), asked.get("residual"), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "nn") for kind in ("normal", "uniform", "huge", "small", "sparse")), *(("wide", at) for at in LAYOUTS)],
)
def test_three_float16_products_err_no_more_than_float32_may(kind: str, layout: str) -> None:
    a = _numbers(kind, 36, 80) if layout[0] == "n" else _numbers(kind, 80, 36).T
    b = _numbers(kind, 80, 20) if layout[1] == "n" else _numbers(kind, 20, 80).T
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def worst(out: Tensor) -> float:
        return float(((out.double() - exact).abs() / sizes.clamp(min=1e-300)).max())

    # float32's sum of 80 numbers one after the other, as a GPU's library adds them; the library here blocks its sums.
    steps = torch.zeros(36, 20)
    for k in range(80):
        steps = steps + a[:, k : k + 1] * b[k : k + 1]
    assert worst(_run_halves(a, b)) <= 2 * max(worst(a @ b), worst(steps))


def test_infinity_and_nan_go_where_float32_sends_them_and_zeros_stay() -> None:
    a, b = _numbers("normal", 8, 40), _numbers("normal", 40, 12)
    a[2, 3], a[4, 5], a[6] = float("inf"), float("nan"), 0.0
    b[7, 9] = float("-inf")
    out = _run_halves(a, b)
    assert torch.equal(out.isfinite(), (a @ b).isfinite())
    assert bool((out[6].nan_to_num() == 0).all())


def test_sums_past_float32_are_infinite_and_below_it_zero() -> None:
    a, b = torch.full((4, 8), 3e38), torch.full((8, 4), 2.0)
    assert bool(_run_halves(a, b).isinf().all())
    assert bool((_run_halves(a * 1e-38 * 1e-38, b * 1e-38) == 0).all())


@pytest.mark.slow
def test_what_follows_the_sum_is_in_the_float32_product_too() -> None:
    a, b, bias = _numbers("normal", 20, 40), _numbers("normal", 40, 24), torch.arange(24.0)
    out = _run_halves(a, b, bias=bias, activation="gelu")
    exact = multiplied(a.double(), b.double(), bias.double(), activation="gelu")
    assert _error(out, exact) <= 2 * _error(multiplied(a, b, bias, activation="gelu"), exact)


def test_float32_accuracy_is_for_float32_operands() -> None:
    with pytest.raises(UsageError, match="bfloat16; leave it out"):
        matmul_problem(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16(), precision="float32")
