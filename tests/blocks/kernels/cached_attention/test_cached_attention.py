from __future__ import annotations

import pytest
import torch
from tests.blocks.kernels.against_float64 import (
    Call,
    Case,
    assert_no_worse_than_reference,
    name_of,
    on_cpu,
    on_device,
    on_devices,
    skip_what_cannot_run,
)
from tests.blocks.kernels.interpreted import interpreted

from flatout.blocks.kernels.cached_attention.call import cached_attention
from flatout.blocks.kernels.cached_attention.triton import run
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_OP = "cached_attention"


def _case(name: str, batch: int, heads: int, shared: int, places: int, dim: int, position: int) -> Case:
    def make(generator: torch.Generator) -> Call:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        kept = [normal(batch, heads // shared, places, dim) for _ in range(2)]
        return Call((normal(batch, heads, 1, dim), *kept, torch.tensor([position])), {})

    return Case(name, make)


CASES = [
    _case("the first place", 1, 2, 1, 130, 16, 0),
    _case("some places, parts that are empty", 2, 2, 1, 300, 32, 70),
    _case("all places", 1, 3, 1, 257, 64, 256),
    _case("heads that share", 2, 4, 2, 192, 16, 150),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_cpu(_OP, CASES), ids=name_of)
def test_it_is_no_worse_than_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_devices(_OP, CASES), ids=name_of)
def test_on_a_device_too(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cuda")


@pytest.mark.slow
def test_what_lies_behind_the_position_is_not_looked_at() -> None:
    q, keys, values, position = CASES[1].call(torch.float32).args
    spoilt = [t.clone() for t in (keys, values)]
    for t in spoilt:
        t[:, :, 71:] = float("nan") if t is spoilt[0] else 1e30
    with interpreted():
        assert torch.equal(run(q, keys, values, position), run(q, *spoilt, position))


def test_what_does_not_fit_is_said() -> None:
    q, keys = torch.ones(1, 4, 1, 16), torch.ones(1, 3, 8, 16)
    at = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UsageError, match="with heads for those of keys"):
        cached_attention(q, keys, keys, at)
    with pytest.raises(UsageError, match="do not meet q"):
        cached_attention(q, keys[:, :2], keys[:, :1], at)
    with pytest.raises(UsageError, match="run on GPUs"):
        cached_attention(q, keys[:, :2], keys[:, :2], at, kernel="cached_attention.triton")


def test_it_compiles_whole() -> None:
    q, keys, values, position = CASES[3].call(torch.float32).args
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: cached_attention(q.sin(), keys, values, position), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q), cached_attention(q.sin(), keys, values, position))
