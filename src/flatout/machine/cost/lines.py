"""The line or function that stands for a cause: the user's own, or a library's where a library runs most of the step below it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.workload import Source

_MOST: Final = 0.5
"""A line of the user's below which libraries take more than this share of the operators' time says nothing of where it goes:
`trainer.train()`, `model(**batch)` with a model of a package's. Half, so that there is at most one."""


class Line(NamedTuple):
    """A row of its own: a line of the user's, with the library's line below it ('' for all of them)."""

    file: str
    line: int
    library: str = ""


def covering_line(evidence: Evidence) -> Line | None:
    """The user's line below which libraries run most of the step, None where there is none."""
    seconds: dict[Line, float] = defaultdict(float)
    for operator in evidence.operators:
        source = evidence.source_of(operator.source)
        if source is not None and source.library:
            seconds[Line(source.file, source.line)] += operator.total_s
    most = max(seconds, key=lambda line: seconds[line], default=None)
    total_s = sum(operator.total_s for operator in evidence.operators)
    return most if most is not None and seconds[most] > _MOST * total_s else None


def line_finder(evidence: Evidence) -> Callable[[int], Line | None]:
    """Give a function that maps a source's index to its line, None for -1.

    A line of the user's is one with all that runs below it; but below a covering line each line of a library is one.
    """
    covering = covering_line(evidence)

    def line_of(index: int) -> Line | None:
        source = evidence.source_of(index)
        if source is None:
            return None
        line = Line(source.file, source.line)
        return line._replace(library=source.library) if line == covering else line

    return line_of


def source_of_line(evidence: Evidence, index: int, line: Line) -> Source | None:
    """The source with this index, as it stands for its whole line: of a line of the user's, one library below it is a part."""
    source = evidence.source_of(index)
    if source is None or line.library:
        return source
    return msgspec.structs.replace(source, library="", via=())


def function_finder(evidence: Evidence) -> Callable[[int], tuple[str, str]]:
    """Give a function that maps a source's index to the file and function of its line, the library's below a covering line; empty
    for -1.
    """
    covering = covering_line(evidence)

    def function_of(index: int) -> tuple[str, str]:
        source = evidence.source_of(index)
        if source is not None and source.via and Line(source.file, source.line) == covering:
            return source.via[-1].file, source.via[-1].function
        return evidence.function_of(index)

    return function_of
