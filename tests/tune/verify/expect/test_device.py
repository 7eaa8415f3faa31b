"""Expectations on a device: kernels that it ran, its memory, and real waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.core.errors import ExpectationFailed
from flatout.tune.verify.expect.api import expect

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).name
CUDA = "cuda"


@pytest.fixture(autouse=True)
def dynamo_is_fresh() -> None:
    torch._dynamo.reset()


def test_each_kernel_counts_with_its_line() -> None:
    x = torch.randn(1024, device=CUDA)

    with pytest.raises(ExpectationFailed, match="forward_kernels=1: 2 ran") as failure, expect(forward_kernels=1):
        x.mul(2).exp()

    assert f"{HERE}:" in str(failure.value)
    assert "x.mul(2).exp()" in str(failure.value)


def test_kernels_of_the_backward_thread_are_the_backwards() -> None:
    x = torch.randn(1024, device=CUDA, requires_grad=True)

    with expect(forward_kernels=2) as observed:
        x.sin().sum().backward()

    assert observed.forward_kernels == 2
    assert 2 <= observed.backward_kernels <= 4
    assert all(launch.site >= 0 for launch in observed.launches)


def test_views_launch_nothing() -> None:
    x = torch.randn(64, 64, device=CUDA)

    with expect(forward_kernels=0, host_waits=0) as observed:
        x.t().reshape(64, 64)[:3].unsqueeze(0)
        torch.empty_like(x)

    assert observed.forward_kernels == 0


def test_kernels_of_a_side_stream_count() -> None:
    x = torch.randn(1024, device=CUDA)
    stream = torch.cuda.Stream()

    with expect() as observed:
        with torch.cuda.stream(stream):
            x.exp()
        x.sin()

    assert observed.forward_kernels == 2


def test_a_replayed_graph_counts_its_kernels() -> None:
    x = torch.randn(1024, device=CUDA)
    x.mul(2).exp()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul(2).exp().sin()

    with expect() as observed:
        graph.replay()

    assert observed.forward_kernels == 3


def test_memory_is_that_of_the_region_and_the_users_counters_are_left_alone() -> None:
    held = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
    before = torch.cuda.max_memory_allocated()

    with expect(peak_bytes=8 << 20) as observed:
        torch.empty(4 << 20, dtype=torch.uint8, device=CUDA).add_(1)

    assert 4 << 20 <= observed.peak_bytes < 5 << 20
    assert observed.peak.device.startswith("cuda")
    assert torch.cuda.max_memory_allocated() >= before
    assert held.numel() == 64 << 20


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t[t > 0],
        torch.nonzero,
        lambda t: getattr(torch.cuda, "synchronize")(),  # noqa: B009  # by hand, on purpose
    ],
    ids=["item", "cpu", "mask", "nonzero", "synchronize"],
)
def test_a_wait_is_reported_with_its_line(read: Callable[[Tensor], Any]) -> None:
    t = torch.randn(1024, device=CUDA)
    read(t)

    with pytest.raises(ExpectationFailed, match="host_waits=0") as failure, expect(host_waits=0):
        read(t)

    assert f"{HERE}:" in str(failure.value)


def test_a_step_without_a_wait_passes() -> None:
    model = nn.Linear(64, 64, device=CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(16, 64, device=CUDA)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with expect(host_waits=0):
        step()


@pytest.mark.slow
def test_a_compiled_chain_is_one_kernel_with_the_line_of_its_function() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1).cos() * 2)
    x = torch.randn(4096, device=CUDA, dtype=torch.bfloat16)

    with expect() as cold:
        compiled(x)
    with expect(forward_kernels=1, graph_breaks=0, recompilations=0) as warm:
        compiled(x)

    assert cold.forward_kernels == warm.forward_kernels == 1
    assert warm.launches[0].site >= 0


@pytest.mark.slow
def test_triton_fuses_a_multiply_add_that_breaks_a_cancellation() -> None:
    compiled = torch.compile(lambda x, y: torch.sqrt(x * x - y * y))

    @expect(recomputed="equal")
    def step(x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = compiled(x, y)
        return out

    x = torch.rand(1000, device=CUDA) + 0.5

    with pytest.raises(ExpectationFailed, match="leaves exactly 0 in eager"):
        step(x, x.clone())


@pytest.mark.slow
def test_a_compiled_model_in_bf16_is_as_good_as_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(CUDA, torch.bfloat16)
    compiled = torch.compile(model)
    compiled(torch.randn(32, 64, device=CUDA, dtype=torch.bfloat16))  # chooses among its kernels by timing them

    @expect(equal="bounded", recomputed="equal", host_waits=0)
    def step(x: Tensor) -> Tensor:
        out: Tensor = compiled(x)
        return out

    step(torch.randn(32, 64, device=CUDA, dtype=torch.bfloat16))
