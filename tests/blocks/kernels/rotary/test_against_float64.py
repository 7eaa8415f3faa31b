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

_OP = "rotary"


def _case(
    name: str, *shape: int, positions: tuple[int, ...] | None = None, is_packed: bool = False, **options: Any
) -> Case:
    def make(generator: torch.Generator) -> Call:
        batch, tokens, heads, dim = shape
        x = drawn(generator, batch, tokens, 3 * heads if is_packed else heads, dim).detach()
        x = x[:, :, heads : 2 * heads] if is_packed else x
        angles = 100 * torch.rand(tokens + 5, dim // 2, generator=generator, dtype=torch.float64)
        at = None if positions is None else torch.randint(tokens + 5, positions, generator=generator)
        return Call((x.requires_grad_(), angles.cos(), angles.sin(), at), options)

    return Case(name, make)


CASES = [
    _case(f"{name}, {layout}", *shape, layout=layout, **more)
    for layout in ("half", "interleaved")
    for name, shape, more in (
        ("plain", (2, 5, 4, 16), {}),
        ("one of all", (1, 1, 1, 2), {}),
        ("odd sizes", (2, 3, 5, 20), {}),
        ("many heads", (1, 2, 37, 128), {}),
        ("positions of tokens", (2, 4, 3, 8), {"positions": (4,)}),
        ("positions of each sequence", (2, 4, 3, 8), {"positions": (2, 4)}),
        ("a part of a packed projection", (2, 4, 3, 8), {"is_packed": True}),
        ("no tokens", (2, 0, 3, 8), {}),
    )
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
