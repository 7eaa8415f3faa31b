"""The small loads whose times are a machine's ceilings.

Random data always: a product of zeros runs 13 % faster on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flatout.core.runtime.patches import set_attributes
from flatout.machine.measure.timer import TimerClock, clock_for

MIB = 2**20
CHAIN_LENGTH = 50

MATMUL_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Load:
    """A call, how much it does (FLOP, bytes or operators, as its maker says), and at which size."""

    call: Callable[[], object]
    work: float
    condition: str


def matmul_load(name: str, *, device: torch.device, limit_s: float, free_bytes: int) -> Load:
    """A square product; the size doubles while a call is expected below `limit_s`, up to what memory and use allow.

    Raises RuntimeError when this torch cannot multiply this dtype here.
    """
    dtype = MATMUL_DTYPES[name]
    largest = 8192 if device.type == "cuda" else 2048
    clock = clock_for(device)
    size, growth = 128, 1.0
    call = _square_product(dtype, size, device)
    call_s = _second_call_s(call, clock)
    # The next size is foreseen from the last growth, not from the 8-fold work: on a busy machine small products take as
    # long as large ones, because they wait for the scheduler.
    while 2 * size <= largest and call_s * growth <= limit_s:
        if 3 * (2 * size) ** 2 * dtype.itemsize > free_bytes // 4:
            break
        size *= 2
        call = _square_product(dtype, size, device)
        before_s, call_s = call_s, _second_call_s(call, clock)
        growth = max(1.0, call_s / before_s)
    return Load(call=call, work=2.0 * size**3, condition=f"square, n = {size}, random data")


def copy_load(*, device: torch.device, num_bytes: int) -> Load:
    """A copy on the device; the work is bytes read plus bytes written."""
    source = random_bytes(num_bytes, device=device)
    target = torch.empty_like(source)
    return Load(
        call=lambda: target.copy_(source),
        work=2.0 * num_bytes,
        condition=f"{num_bytes / MIB:.4g} MiB to as many, read plus write",
    )


def captured_copy(*, device: torch.device, num_bytes: int) -> Load:
    """Many small copies in one CUDA graph: alone, each would be shorter than its launch."""
    source = random_bytes(num_bytes, device=device)
    target = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads of the program do meanwhile must not spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CHAIN_LENGTH):
            target.copy_(source)
    return Load(
        call=graph.replay,
        work=2.0 * num_bytes * CHAIN_LENGTH,
        condition=f"{num_bytes / MIB:.4g} MiB to as many, {CHAIN_LENGTH} copies in a CUDA graph, read plus write",
    )


def tiny_operator(*, device: torch.device) -> Load:
    """One addition of two numbers that need no gradient."""
    a, b = _random((2, 1), torch.float32, device).unbind()
    return Load(call=lambda: torch.add(a, b), work=1.0, condition="torch.add of one element, no gradient")


def tiny_sequence(*, device: torch.device) -> Load:
    """A chain of multiplications of one number with its backward; the work is the number of forward operators."""
    x = _random((1,), torch.float32, device).requires_grad_()
    # Close to one, so that the chain neither vanishes nor overflows.
    weight = 1 + _random((1,), torch.float32, device).abs() * 1e-3

    def call() -> Tensor:
        y = x
        with torch.enable_grad():
            for _ in range(CHAIN_LENGTH):
                y = torch.mul(y, weight)
        return torch.autograd.grad(y, x)[0]

    return Load(
        call=call, work=CHAIN_LENGTH, condition=f"{CHAIN_LENGTH} x torch.mul of one element, forward and backward"
    )


def read_back(*, device: torch.device) -> Load:
    """One number read by the host from an idle device."""
    x = _random((1,), torch.float32, device)
    return Load(call=x.item, work=1.0, condition="Tensor.item() with an empty queue")


def host_to_device(*, device: torch.device, num_bytes: int, memory: Literal["pageable", "pinned"]) -> Load:
    """A copy from the host; the work is the bytes moved."""
    source = random_bytes(num_bytes, device=torch.device("cpu"))
    if memory == "pinned":
        source = source.pin_memory()
    target = torch.empty_like(source, device=device)
    return Load(
        call=lambda: target.copy_(source, non_blocking=memory == "pinned"),
        work=float(num_bytes),
        condition=f"{num_bytes / MIB:.4g} MiB from {memory} memory",
    )


@contextmanager
def float32_precision(device: torch.device, precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Float32 products with exactly this precision inside; the setting that was there afterwards."""
    # torch replaces the module torch.backends.mkldnn by an object whose attributes mypy cannot see.
    mkldnn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backend = torch.backends.cuda.matmul if device.type == "cuda" else mkldnn
    undo = set_attributes(backend, fp32_precision=precision)
    try:
        yield
    finally:
        undo()


def random_bytes(num_bytes: int, *, device: torch.device) -> Tensor:
    """A tensor of bytes: a random MiB, repeated; drawing all of it would take longer than the probe."""
    block = _random((min(num_bytes, MIB),), torch.int8, device)
    return block.repeat(-(-num_bytes // MIB))[:num_bytes]


def _square_product(dtype: torch.dtype, size: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = _random((size, size), dtype, device), _random((size, size), dtype, device)
    if dtype is torch.int8:
        b = b.t()  # the layout that cuBLASLt wants
        return lambda: torch._int_mm(a, b)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _second_call_s(call: Callable[[], object], clock: TimerClock) -> float:
    call()  # the first call of a size chooses kernels and fills caches
    return clock.elapsed_s(call, 1)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Its own generator: the program's random numbers must not depend on whether it was probed.
    generator = torch.Generator(device=device).manual_seed(0)
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device, generator=generator)
    return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
