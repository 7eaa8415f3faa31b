from __future__ import annotations

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

_OP = "swiglu"


def _case(name: str, *shape: int, is_packed: bool = False, are_halves: bool = False, by: float = 1.0) -> Case:
    def make(generator: torch.Generator) -> Call:
        if is_packed:
            return Call((drawn(generator, *shape, by=by), None), {})
        if are_halves:
            gate, up = drawn(generator, *shape, by=by).detach().chunk(2, dim=-1)
            return Call((gate.requires_grad_(), up.requires_grad_()), {})
        return Call((drawn(generator, *shape, by=by), drawn(generator, *shape)), {})

    return Case(name, make)


CASES = [
    _case("two tensors", 6, 64),
    _case("odd sizes, three dimensions", 3, 5, 77),
    _case("one row", 1, 130),
    _case("one dimension", 30),
    _case("packed", 5, 66, is_packed=True),
    _case("packed, three dimensions, wider than a program", 2, 2, 8300, is_packed=True),
    _case("halves of one tensor", 7, 50, are_halves=True),
    _case("wide", 3, 9001),
    _case("large numbers", 4, 96, by=100.0),
    _case("no rows", 0, 40, is_packed=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_cpu(_OP, CASES), ids=name_of)
def test_results_and_gradients_are_no_worse_than_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_devices(_OP, CASES), ids=name_of)
def test_on_a_device_too(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cuda")
