"""Failed expectations, and what was observed, as lines of text."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from flatout.core.records.workload import CELL, short_place
from flatout.core.runtime.source_sites import Sites

_MOST_ROWS: Final = 12
_MOST_TEXT: Final = 60


class Breach(NamedTuple):
    """One expectation that failed: as it was written ('host_waits=0'), what was observed instead, by whom, and what may help."""

    expectation: str
    instead: str
    rows: tuple[str, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.expectation}: {self.instead}", *(f"    {row}" for row in self.rows)]
        return "\n".join([*lines, f"    -> {self.advice}"] if self.advice else lines)


def source_place(sites: Sites, site: int) -> str:
    """A line as 'file.py:12 in function: text', the file relative to where we are."""
    if site < 0:
        return "no line of yours is known"
    source = sites.table()[site]
    text = source.text or linecache.getline(source.file, source.line).strip()
    text = text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."
    is_cell = CELL.fullmatch(os.path.basename(source.file))
    where = short_place(source.file, source.line) if is_cell else f"{short_path(source.file)}:{source.line}"
    return f"{where}: {text}" if text else where


def short_path(file: str) -> str:
    """The path from the working directory on, where the file lies below it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def rows_of(sites: Sites, things: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """One row for each thing at each line (an index), with the number of times, in order; many are cut."""
    counted = list(Counter(things).items())
    rows = [f"{number:>3} x {name}  {source_place(sites, site)}" for (name, site), number in counted[:_MOST_ROWS]]
    left = sum(number for _, number in counted[_MOST_ROWS:])
    return (*rows, f"... and {left} more") if left else tuple(rows)


def mebibytes(size: int) -> str:
    """Bytes in the unit that reads best.

    >>> mebibytes(1536), mebibytes(3 << 20)
    ('1.5 KiB', '3.0 MiB')
    """
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << unit:
            return f"{size / (1 << unit):.1f} {name}"
    return f"{size} B"


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of two columns as aligned lines of text."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
