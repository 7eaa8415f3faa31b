"""Every kernel of the registry against float64: no worse than twice the reference at the same dtype, beside one rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.selection import select_kernel
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Call(NamedTuple):
    """What a kernel is called with; the tensors that require gradients are its leaves."""

    args: tuple[Any, ...]
    options: dict[str, Any]

    def leaves(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor) and a.requires_grad]


class Case(NamedTuple):
    """A name, and inputs drawn in float64."""

    name: str
    make: Callable[[torch.Generator], Call]

    def call(self, dtype: torch.dtype, device: str = "cpu") -> Call:
        """In this dtype. Its numbers in float64 are `exact` of it, not what was drawn."""
        made = self.make(torch.Generator().manual_seed(0))
        return Call(tuple(_cast(a, dtype, device) for a in made.args), made.options)


def _cast(value: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    # Strides are kept: what lies apart shall lie apart.
    moved = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device).copy_(value.detach())
    return moved.requires_grad_(value.requires_grad)


def drawn(generator: torch.Generator, *shape: int, by: float = 1.0) -> Tensor:
    return (by * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def results(run: Callable[..., Any], call: Call) -> list[Tensor]:
    """What is returned, and the gradients of its product with fixed random numbers."""
    made = run(*call.args, **call.options)
    outputs = list(made) if isinstance(made, tuple) else [made]
    generator = torch.Generator().manual_seed(1)
    learnt = [o for o in outputs if o.requires_grad]
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in learnt]
    leaves = call.leaves()
    gradients = torch.autograd.grad(learnt, leaves, grads) if leaves else ()
    return [o.detach() for o in outputs] + list(gradients)


def exact(reference: Kernel, call: Call) -> list[Tensor]:
    """The reference on the same numbers in float64, on their device."""
    wide = Call(
        tuple(_cast(a, torch.float64, str(a.device)) if isinstance(a, Tensor) else a for a in call.args), call.options
    )
    return results(reference.run, wide)


def error(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over that of what is wanted. NaN is equal to NaN and to nothing else."""
    assert got.shape == wanted.shape
    got = got.double()
    if bool((got.isnan() != wanted.isnan()).any()):
        return float("inf")
    difference, size = (got - wanted).nan_to_num().norm(), wanted.nan_to_num().norm()
    return float(difference / size) if size > 0 else float(difference)


def assert_no_worse_than_reference(
    kernel: Kernel, reference: Kernel, case: Case, dtype: torch.dtype, device: str
) -> None:
    call = case.call(dtype, device)
    wanted = exact(reference, call)
    usual = results(reference.run, case.call(dtype, device))
    if device == "cpu" and kernel.id.endswith(".triton"):
        with interpreted():
            got = results(kernel.run, case.call(dtype, device))
    else:
        got = results(kernel.run, case.call(dtype, device))
    assert [g.dtype for g in got] == [u.dtype for u in usual]
    for number, (a, b, c) in enumerate(zip(got, usual, wanted, strict=True)):
        limit = 2 * error(b, c) + _floor(call, dtype)
        assert error(a, c) <= limit, f"result {number}: error {error(a, c):.2e}, allowed {limit:.2e}"


def _floor(call: Call, dtype: torch.dtype) -> float:
    """One rounding. The reference in float64 is exact by definition: there, sums of n numbers in another order may differ by the
    sqrt(n) roundings of a random walk."""
    if dtype != torch.float64:
        return torch.finfo(dtype).eps
    longest = max((a.numel() for a in call.args if isinstance(a, Tensor)), default=1)
    return math.sqrt(longest + 1) * torch.finfo(dtype).eps


def why_not(kernel: Kernel, call: Call, dtype: torch.dtype, device: str) -> str | None:
    """Refusals are the kernel's own; the interpreter runs on a CPU what would refuse one, but not bfloat16."""
    if device == "cpu" and kernel.id.endswith(".triton"):
        if dtype in (torch.bfloat16, torch.float64):
            return f"Triton's interpreter gets {dtype} wrong, or the kernel refuses it"
        return None
    return kernel.refusal(*call.args, **call.options)


def skip_what_cannot_run(kernel: Kernel, call: Call, dtype: torch.dtype, device: str) -> None:
    reason = why_not(kernel, call, dtype, device)
    if reason is not None:
        pytest.skip(reason)


def on_cpu(
    op: str, cases: Sequence[Case], *, refused: Callable[[Kernel, Case], str | None] = lambda *_: None
) -> list[Any]:
    """Kernel, case and dtype, for each kernel but the reference (what all are compared with), as far as they run here.

    A kernel that runs nothing of it is skipped once, with its first reason.
    """
    made = []
    calls = [(case, dtype, case.call(dtype)) for case in cases for dtype in CPU_DTYPES]
    for kernel in kernels(op)[:-1]:
        reasons = [refused(kernel, case) or why_not(kernel, call, dtype, "cpu") for case, dtype, call in calls]
        can = [(kernel, *given[:2]) for given, reason in zip(calls, reasons, strict=True) if reason is None]
        made += can or [
            pytest.param(kernel, *calls[0][:2], marks=pytest.mark.skip(reason=f"{kernel.id}: {reasons[0]}"))
        ]
    return made


def on_devices(op: str, cases: Sequence[Case]) -> list[Any]:
    """Kernel, case and dtype; without a GPU one of each kernel stands for all, skipped with that reason."""
    made = [(kernel, case, dtype) for kernel in kernels(op)[:-1] for case in cases for dtype in DEVICE_DTYPES]
    return made if torch.cuda.is_available() else made[:: len(cases) * len(DEVICE_DTYPES)]


def is_selected(kernel: Kernel, call: Call) -> bool:
    return select_kernel(kernel.op, *call.args, **call.options).kernel == kernel


def name_of(value: object) -> str:
    if isinstance(value, Kernel):
        return value.id.rpartition(".")[2]
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")
