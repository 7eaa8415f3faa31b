"""Runs a product by the variant that is selected for it; what was bound once is found again by the operands' shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul import table
from flatout.blocks.kernels.matmul.implementation import bound
from flatout.blocks.kernels.matmul.measurement import measured_problem
from flatout.blocks.kernels.matmul.packing import Matrix, Packed
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.table import MeasuredProblem
from flatout.blocks.kernels.matmul.variant import Runner
from flatout.blocks.kernels.opaque import Side

_MOST_BOUND: Final = 4096
"""Problems that are remembered; a program with more shapes than that begins anew."""
_bound: dict[object, Runner] = {}
known = _bound.get  # the runner of a call like an earlier one
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


def measure_matmul(problem: MatmulProblem, *, has_compiled: bool = False) -> MeasuredProblem:
    """Measure every variant of a problem and store the result, whether it was measured before or not."""
    found = measured_problem(problem, has_compiled=has_compiled)
    table.add(problem.device, found)
    _bound.clear()
    return found


def forget() -> None:
    """Drop every bound runner: the next call of each problem reads the table again."""
    _bound.clear()


def call_key(
    a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side, options: tuple[object, ...]
) -> tuple[object, ...]:
    """What a runner depends on: all that is looked at in a call that is like an earlier one."""
    source, is_transposed = (b.source, b.is_transposed) if isinstance(b, Packed) else (b, None)
    return (
        *(a.shape, a.stride(), a.dtype, a.device, source.shape, source.stride(), source.dtype, is_transposed, options),
        bias is not None and bias.stride(),
        residual is not None and (residual.shape, residual.stride()),
        scale is not None and (scale.shape, scale.stride()),
        torch.cuda.is_current_stream_capturing() if a.is_cuda else torch.get_num_threads(),
    )


def know(key: object, runner: Runner) -> None:
    """Remember the runner of a call for later ones like it."""
    if len(_bound) >= _MOST_BOUND:
        _bound.clear()
    _bound[key] = runner


def runner_of(problem: MatmulProblem) -> Runner:
    """The runner of the selected variant; measures first inside `measuring()`, except while a graph is captured."""
    is_captured = problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if _measuring and not is_captured and str(problem) not in table.device_table(problem.device).entries:
        table.add(problem.device, measured_problem(problem, has_compiled=_measuring[-1]))
    return bound(problem, table.select_variant(problem, is_captured=is_captured).variant)


def runner_with_copies(problem: MatmulProblem) -> Runner:
    """A runner as `runner_of` returns it, which for a constant b runs the variant of captured graphs once, too.

    A graph that is captured later then finds the copies of b that it needs, and does not repeat them at each replay.
    """
    runner = runner_of(problem)
    if not (problem.is_constant and problem.device.type == "cuda") or torch.cuda.is_current_stream_capturing():
        return runner
    now, later = (table.select_variant(problem, is_captured=is_captured).variant for is_captured in (False, True))
    if now == later:
        return runner
    captured, name = bound(problem, later), str(problem)

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        if isinstance(b, Packed) and b.is_new_to(name):
            captured(a, b, bias, residual, scale)
        return runner(a, b, bias, residual, scale)

    return run
