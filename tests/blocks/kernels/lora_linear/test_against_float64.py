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

_OP = "lora_linear"


def _case(
    name: str,
    *rows: int,
    width: int,
    out: int,
    rank: int = 4,
    has_bias: bool = False,
    is_frozen: bool = True,
    is_apart: bool = False,
    by: float = 1.0,
    scale: float = 2.0,
) -> Case:
    def make(generator: torch.Generator) -> Call:
        x = (
            drawn(generator, width, *rows).detach().movedim(0, -1)
            if is_apart
            else drawn(generator, *rows, width).detach()
        )
        weight = drawn(generator, out, width, by=width**-0.5)
        weight = weight.detach() if is_frozen else weight
        down, up = drawn(generator, rank, width, by=width**-0.5), drawn(generator, out, rank, by=by * rank**-0.5)
        bias = drawn(generator, out) if has_bias else None
        return Call((x.requires_grad_(), weight, down, up, bias), {"scale": scale})

    return Case(name, make)


CASES = [
    _case("frozen weight", 64, width=32, out=48),
    _case("trained weight, bias", 64, width=32, out=48, has_bias=True, is_frozen=False),
    _case("three dimensions, odd sizes", 3, 17, width=33, out=7, rank=3),
    _case("strided rows", 5, 30, width=24, out=40, is_apart=True),
    _case("adapter larger than its layer", 80, width=32, out=32, by=30.0),
    _case("scale of 0", 64, width=32, out=48, scale=0.0),
    _case("rank of 1, as many rows as it takes", 16, width=32, out=32, rank=1),
]


@pytest.mark.parametrize(("kernel", "case", "dtype"), on_cpu(_OP, CASES), ids=name_of)
def test_results_and_gradients_are_no_worse_than_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_devices(_OP, CASES), ids=name_of)
def test_on_a_device_too(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cuda")
