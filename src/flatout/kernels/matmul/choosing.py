"""Runs a product the way that is chosen for it; what was chosen and bound once is found again by the operands' shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from flatout.kernels.matmul import table
from flatout.kernels.matmul.packing import Packed
from flatout.kernels.matmul.problem import Problem
from flatout.kernels.matmul.table import Measured
from flatout.kernels.matmul.trial import measured
from flatout.kernels.matmul.way import Runner
from flatout.kernels.matmul.ways import bound

_MOST_BOUND: Final = 4096
"""Problems that are remembered; a program with more shapes than that begins anew."""
_bound: dict[object, Runner] = {}
_measuring: list[bool] = []


@contextmanager
def measuring(*, has_compiled: bool = False) -> Iterator[None]:
    """Inside, a product whose problem is not in the table is measured at its first call, which takes a second or more.

    `has_compiled`: torch.compile's own templates as well, which take much longer.
    """
    _bound.clear()
    _measuring.append(has_compiled)
    try:
        yield
    finally:
        _measuring.pop()
        _bound.clear()


def measure(problem: Problem, *, has_compiled: bool = False) -> Measured:
    """Measure every way of a problem and keep the result, whether it was measured before or not."""
    found = measured(problem, has_compiled=has_compiled)
    table.add(problem.device, found)
    _bound.clear()
    return found


def forget() -> None:
    """What is bound: the next call of each problem looks into the table again."""
    _bound.clear()


def key_of(
    a: Tensor,
    b: Tensor | Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    asked: tuple[object, ...],
) -> object:
    """What a runner depends on: all that is looked at in a call whose like was made before."""
    source, kept = (b.source, b.is_transposed) if isinstance(b, Packed) else (b, None)
    return (
        *(a.shape, a.stride(), a.dtype, a.device, source.shape, source.stride(), source.dtype, kept, asked),
        bias is not None and bias.stride(),
        residual is not None and (residual.shape, residual.stride()),
        scale is not None and (scale.shape, scale.stride()),
        torch.cuda.is_current_stream_capturing() if a.is_cuda else torch.get_num_threads(),
    )


def known(key: object) -> Runner | None:
    """The runner of a call like an earlier one."""
    return _bound.get(key)


def know(key: object, runner: Runner) -> None:
    """Remember it."""
    if len(_bound) >= _MOST_BOUND:
        _bound.clear()
    _bound[key] = runner


def runner_of(problem: Problem) -> Runner:
    """Of the chosen way; measures first inside `measuring()`, except while a graph is captured."""
    is_captured = problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if _measuring and not is_captured and str(problem) not in table.table_of(problem.device).entries:
        table.add(problem.device, measured(problem, has_compiled=_measuring[-1]))
    return bound(problem, table.choose(problem, is_captured=is_captured).way)


def runner_with_copies(problem: Problem) -> Runner:
    """`runner_of`, which for a matrix that is kept takes the way of captured graphs once, too: a graph that is captured later
    finds its copies made, and does not make them at each replay."""
    runner = runner_of(problem)
    if not (problem.is_kept and problem.device.type == "cuda") or torch.cuda.is_current_stream_capturing():
        return runner
    now, later = (table.choose(problem, is_captured=is_captured).way for is_captured in (False, True))
    if now == later:
        return runner
    captured, name = bound(problem, later), str(problem)

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        if isinstance(b, Packed) and b.is_new_to(name):
            captured(a, b, bias, residual, scale)
        return runner(a, b, bias, residual, scale)

    return run
