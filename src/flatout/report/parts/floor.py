"""The hot lines, and a device's kernels, against the roofline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis, HotLine, KernelTime
from flatout.report.document import Cell, Column, Table, numbers
from flatout.report.places import innermost_place
from flatout.report.sanitise import Path

_NUM_SHOWN: Final = 12
_ROOMY: Final = 95
"""Columns from which two blanks stand between columns."""
_NARROW: Final = 70
"""Columns below which FLOP and bytes are left out."""
WITHOUT_FLOOR: Final = "no floor: what such a kernel reads and writes is not known"
_SMALLEST_FRACTION: Final = 0.01
_LONGEST_NAME: Final = 60
_MOST_SHAPES: Final = 3
_FAR: Final = 999.0
"""Above this many times the floor the figure says only that the line's work is next to nothing."""


def hot_lines(evidence: Evidence, diagnosis: Diagnosis) -> Table:
    """The lines that take the most, and what is not in the table."""
    lines, rest = diagnosis.hot_lines[:_NUM_SHOWN], diagnosis.hot_lines[_NUM_SHOWN:]
    unit = units.time_unit(max(line.seconds for line in lines), digits=4)
    traffic = [column._replace(from_width=_NARROW) for column in numbers("FLOP", "bytes", "FLOP/B")]
    columns = [Column("line"), *numbers(unit.name, "Python", "floor", "of floor"), *traffic]
    has_floor = diagnosis.floor_s is not None
    rows = [list(_cells(line, evidence.workload.cwd, unit, has_floor=has_floor)) for line in lines]
    below = []
    if rest:
        left = units.duration(sum(line.seconds for line in rest))
        below.append(f"and {units.counted(len(rest), 'more line')}, {left} together")
    if not has_floor:
        below.append("no floor: the ceilings of this machine are not known")
    return Table([*columns, Column("bound by", is_whole=True)], rows, rest=below, roomy_from=_ROOMY)


def shown_kernels(diagnosis: Diagnosis) -> tuple[KernelTime, ...]:
    """Operators and compiled kernels that are a hundredth of the step or more above their floor; without one, as long as that."""
    least_s = _SMALLEST_FRACTION * diagnosis.step_s
    return tuple(
        kernel
        for kernel in diagnosis.kernels
        if (kernel.seconds if kernel.floor_s is None else kernel.above_floor_s) >= least_s > 0
    )[:_NUM_SHOWN]


def kernels_above_floor(diagnosis: Diagnosis) -> Table | None:
    """The `shown_kernels`, or None where there are none."""
    shown = shown_kernels(diagnosis)
    if not shown:
        return None
    unit = units.time_unit(diagnosis.step_s, digits=4)
    columns = [Column("operator or kernel"), *numbers("calls", unit.name, "floor", "above", "of floor")]
    columns.append(Column("shapes", from_width=_ROOMY))
    rows = [list(_kernel_cells(kernel, unit)) for kernel in shown]
    below = [WITHOUT_FLOOR] if any(kernel.floor_s is None for kernel in shown) else []
    return Table(columns, rows, rest=below, roomy_from=_ROOMY)


def _kernel_cells(kernel: KernelTime, unit: units.TimeUnit) -> Iterator[Cell]:
    floor_s = kernel.floor_s
    yield kernel_name(kernel)
    yield units.number(kernel.num_calls) if kernel.num_calls % 1 else str(int(kernel.num_calls))
    yield unit.show(kernel.seconds)
    yield unit.show(floor_s) if floor_s is not None else units.UNKNOWN
    yield unit.show(kernel.above_floor_s) if floor_s is not None else units.UNKNOWN
    yield _of_floor(kernel.seconds / floor_s) if floor_s else units.UNKNOWN
    yield kernel_shapes(kernel)


def kernel_name(kernel: KernelTime) -> str:
    """The operator or kernel without the namespace that a reader knows.

    >>> kernel_name(KernelTime(op="inductor.triton_poi_fused_gelu_3", shapes=(), num_calls=1, seconds=1.0, floor_s=None))
    'triton_poi_fused_gelu_3'
    """
    return re.sub(r"^(aten|inductor|kernel)\.", "", kernel.op)[:_LONGEST_NAME]


def kernel_shapes(kernel: KernelTime) -> str:
    """The shapes of its first tensors.

    >>> kernel_shapes(KernelTime(op="aten.mm", shapes=((64, 768), (768, 8), ()), num_calls=1, seconds=1.0, floor_s=None))
    '64x768, 768x8, 1'
    """
    return ", ".join("x".join(map(str, shape)) or "1" for shape in kernel.shapes[:_MOST_SHAPES])


def _cells(line: HotLine, cwd: str, unit: units.TimeUnit, *, has_floor: bool) -> Iterator[Cell]:
    floor_s = line.floor_s if has_floor and line.floor_s else None
    yield Path(innermost_place(line.source, cwd=cwd))
    yield unit.show(line.seconds)
    yield unit.show(line.python_s)
    yield unit.show(floor_s) if floor_s is not None else units.UNKNOWN
    yield _of_floor(line.seconds / floor_s) if floor_s is not None else units.UNKNOWN
    yield units.work(line.flop).removesuffix("FLOP").rstrip()
    yield units.size(line.bytes)
    yield units.number(line.intensity)
    yield line.regime if floor_s is not None else units.UNKNOWN


def _of_floor(ratio: float) -> str:
    return f">{_FAR:.0f}x" if ratio > _FAR else f"{units.number(ratio)}x"
