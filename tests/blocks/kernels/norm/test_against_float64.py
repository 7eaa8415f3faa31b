from __future__ import annotations

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

from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels


def _case(
    name: str,
    *shape: int,
    has_weight: bool = True,
    has_bias: bool = True,
    has_residual: bool = False,
    is_layer: bool = False,
    is_strided: bool = False,
    by: float = 1.0,
    level: float = 0.0,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    def make(generator: torch.Generator) -> Call:
        lying = (*shape[:-1], 2 * shape[-1]) if is_strided else shape
        x = (drawn(generator, *lying, by=by).detach() + level)[..., : shape[-1]].requires_grad_()
        weight = drawn(generator, shape[-1]) if has_weight else None
        bias = drawn(generator, shape[-1]) if has_bias else None
        residual = drawn(generator, *shape, by=by) if has_residual else None
        for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
            if tensor is not None:
                tensor.requires_grad_(name not in frozen)
        return Call((x, weight, bias, residual) if is_layer else (x, weight, residual), options)

    return Case(name, make)


def _cases(is_layer: bool) -> list[Case]:
    has: dict[str, Any] = {"is_layer": is_layer}
    return [
        _case("a power of two", 6, 64, **has),
        _case("an odd width, three dimensions", 3, 5, 77, **has),
        _case("one row", 1, 130, **has),
        _case("three columns", 5, 3, **has),
        _case("many rows", 41, 9, **has),
        _case("with a residual", 7, 100, has_residual=True, **has),
        _case("without weight and bias", 4, 50, has_weight=False, has_bias=False, has_residual=True, **has),
        _case("without bias", 4, 50, has_bias=False, **has),
        _case("without weight", 4, 50, has_weight=False, **has),
        _case("rows apart", 9, 33, is_strided=True, has_residual=True, **has),
        _case("wider than a block", 3, 17001, **has),
        _case("wider than a block, with a residual", 4, 16500, has_residual=True, **has),
        _case("large numbers", 4, 96, by=3000.0, **has),
        _case("far from zero", 4, 96, level=50.0, **has),
        _case("all but zero, another eps", 4, 96, by=1e-3, eps=1e-4, **has),
        _case("only the weight learns", 4, 40, frozen=("x", "residual"), has_residual=True, **has),
        _case("only x learns", 4, 40, frozen=("weight", "residual"), has_residual=True, **has),
        _case("no rows", 0, 40, has_residual=True, **has),
    ]


OPS = ("norm.rms_norm", "norm.layer_norm")
CASES = {op: _cases(op == "norm.layer_norm") for op in OPS}
ON_DEVICES = {
    "norm.rms_norm": [*CASES["norm.rms_norm"], _case("wide", 300, 65536, has_residual=True)],
    "norm.layer_norm": [*CASES["norm.layer_norm"], _case("wide", 300, 40001, is_layer=True)],
}


def _known(kernel: Kernel, case: Case) -> str | None:
    if kernel.id == "norm.layer_norm.native" and case.name == "far from zero":
        return "PyTorch's own gradients lose digits there: up to 10 times the reference's error, as its docstring says"
    return None


def _name(value: object) -> str:
    return value.id if isinstance(value, Kernel) else name_of(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "case", "dtype"), [c for op in OPS for c in on_cpu(op, CASES[op], refused=_known)], ids=_name
)
def test_results_and_gradients_are_no_worse_than_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels(kernel.op)[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(
    ("kernel", "case", "dtype"), [c for op in OPS for c in on_devices(op, ON_DEVICES[op])], ids=_name
)
def test_on_a_device_too(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    reason = _known(kernel, case)
    if reason is not None:
        pytest.skip(reason)
    assert_no_worse_than_reference(kernel, kernels(kernel.op)[-1], case, dtype, "cuda")
