"""The hot lines against the roofline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis, HotLine
from flatout.report.document import Cell, Column, Table, numbers
from flatout.report.places import innermost_place
from flatout.report.sanitise import Path

_NUM_SHOWN: Final = 12
_ROOMY: Final = 95
"""Columns from which two blanks stand between columns."""
_NARROW: Final = 70
"""Columns below which FLOP and bytes are left out."""
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
