from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.blocks.kernels.against_float64 import name_of
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.rotary.call import rotary
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_KERNELS = kernels("rotary")


def _inputs(tokens: int = 6, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    angles = torch.outer(torch.arange(tokens + 4.0), 100 ** (-torch.arange(dim // 2) * 2 / dim))
    return torch.randn(2, tokens, 3, dim).requires_grad_(), angles.cos(), angles.sin()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_products_of_queries_and_keys_depend_on_distance_alone(layout: str) -> None:
    query, cos, sin = _inputs()
    key = torch.randn_like(query)

    def products(shift: int) -> Tensor:
        at = torch.arange(6) + shift
        q, k = (rotary(x, cos, sin, at, layout=layout) for x in (query, key))
        return torch.einsum("btnh,bsnh->bnts", q, k)

    torch.testing.assert_close(products(0), products(3))


def test_the_layouts_are_permutations_of_one_another() -> None:
    x, cos, sin = _inputs()
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    half = rotary(x, cos, sin, layout="half")
    torch.testing.assert_close(rotary(x[..., order], cos, sin, layout="interleaved"), half[..., order])


def test_a_position_outside_of_the_tables_is_not_silent() -> None:
    x, cos, sin = _inputs()
    at = torch.tensor([0, 1, 2, 3, 4, 99])
    with pytest.raises(IndexError):
        rotary(x, cos, sin, at)
    with interpreted():
        made = _KERNELS[0].run(x, cos, sin, at)
    assert made[:, 5].isnan().all() and not made[:, :5].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _KERNELS, ids=name_of)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_compiles_whole(kernel: Kernel, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.blocks.kernels.selection.kernel_for", lambda *_, **__: kernel)
    x, cos, sin = _inputs()

    def step(x: Tensor) -> Tensor:
        return rotary(x.tanh(), cos, sin, layout=layout).square().sum() + rotary(x, cos, sin).sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with interpreted() if kernel.id.endswith("triton") else nullcontext():
        for a, b in zip(*(torch.autograd.grad(f(x), x) for f in (step, compiled)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layout": "other"}, "none of half, interleaved"),
        ({"x": torch.ones(2, 6, 8)}, "give floating-point (B, T, N, H)"),
        ({"cos": torch.ones(10, 3)}, "are not tables"),
        ({"cos": torch.ones(10, 4, requires_grad=True)}, "tables get none"),
        ({"cos": torch.ones(5, 4), "sin": torch.ones(5, 4)}, "6 tokens, the tables 5 positions"),
        ({"positions": torch.arange(5)}, "not one for each token"),
        ({"positions": torch.ones(6)}, "give integers"),
        ({"kernel": "rotary.triton"}, "is on 'cpu'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], says: str) -> None:
    x, cos, sin = _inputs()
    with pytest.raises(UsageError) as raised:
        rotary(**{"x": x, "cos": cos, "sin": sin, **change})
    assert says in str(raised.value)
