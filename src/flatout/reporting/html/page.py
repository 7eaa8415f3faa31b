"""The whole page: records and figures into the template. All text goes through autoescape, and is made inert before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from markupsafe import Markup

from flatout.cost.accounting import bytes_by_kind
from flatout.records.evidence import Evidence
from flatout.records.finding import Diagnosis, HotLine, RankedFinding
from flatout.records.memory import Memory, MemoryKind
from flatout.records.workload import Source
from flatout.reporting import text, units
from flatout.reporting.bars import LOOKS
from flatout.reporting.html.blank import environment, style
from flatout.reporting.html.code import Change, Line, edit, excerpt, highlighted
from flatout.reporting.html.figure import PHASES
from flatout.reporting.html.manual import Entry, manual
from flatout.reporting.html.memory import memory_svg
from flatout.reporting.html.roofline import roofline_svg
from flatout.reporting.html.steps import steps_svg
from flatout.reporting.html.timeline import timeline_svg
from flatout.reporting.inert import place, place_of
from flatout.reporting.memory import memory_cost, memory_gain

if TYPE_CHECKING:
    from jinja2 import Environment, Template

T = TypeVar("T")

_MOST_ROWS: Final = 12
"""Rows of a table that are shown; the rest is counted."""
_MOST_FINDINGS: Final = 40
_LONGEST_PLACE: Final = 40


class Cause(NamedTuple):
    """A finding with what surrounds it on the page."""

    number: int
    finding: RankedFinding
    gain: tuple[str, str]
    """What is at stake, the figure and its word: ('1.3x - 1.4x', 'faster')."""
    memory: tuple[str, ...]
    where: str
    lines: tuple[Line, ...]
    changes: tuple[Change, ...]
    manual: tuple[Entry, ...]


class Rows(NamedTuple):
    """The first rows of a table, and how many more there are."""

    shown: Sequence[object]
    num_more: int


class MemoryView(NamedTuple):
    """One device's memory and its curve."""

    memory: Memory
    kinds: dict[MemoryKind, int]
    curve: Markup | None


def html_report(evidence: Evidence, diagnosis: Diagnosis) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file.

    Lines around a finding are read from its source file where that file is here and still holds the line that ran.
    """
    cwd = evidence.workload.cwd
    causes = [
        _cause(number, finding, cwd=cwd) for number, finding in enumerate(diagnosis.findings[:_MOST_FINDINGS], start=1)
    ]
    lines: tuple[HotLine, ...] = diagnosis.hot_lines[:_MOST_ROWS]
    page = _template().render(
        evidence=evidence,
        diagnosis=diagnosis,
        causes=causes,
        headline=(headline := text.headline(evidence, diagnosis)),
        lede=_lede(headline, f"{units.duration(diagnosis.step_s)} {text.STEP_NAMES[evidence.steps.kind]}"),
        step_name=text.STEP_NAMES[evidence.steps.kind],
        circumstances=tuple(text.circumstances(evidence)),
        failure=text.exit_message(evidence),
        observing=text.observing_cost(evidence),
        timeline=timeline_svg(evidence, diagnosis.findings),
        roofline=roofline_svg(evidence, lines),
        hot_lines=lines,
        memory=[
            MemoryView(m, bytes_by_kind(m.at_peak), memory_svg(m, name=f"memory{i}"))
            for i, m in enumerate(evidence.memory[:8])
        ],
        steps=steps_svg(evidence.steps),
        style=style(),
    )
    return page.encode("utf-8", "backslashreplace")


def _cause(number: int, finding: RankedFinding, *, cwd: str) -> Cause:
    gain = (units.speedup(finding.gain), "faster") if finding.saves_time else (memory_gain(finding), "")
    return Cause(
        number=number,
        finding=finding,
        gain=gain,
        memory=tuple(memory_cost(finding)),
        where=place(finding.file, finding.line, cwd=cwd),
        lines=excerpt(finding),
        changes=edit(finding),
        manual=manual(finding.rule),
    )


@cache
def _template() -> Template:
    found = environment()
    _add_filters(found)
    return found.get_template("page.html.jinja")


def _add_filters(environment: Environment) -> None:
    environment.filters.update(
        duration=units.duration,
        size=units.size,
        work=units.work,
        number=units.number,
        percent=units.percent,
        speedup=units.speedup,
        work_rate=units.work_rate,
        size_rate=units.size_rate,
        grow=_grow,
        rows=_rows,
        floor=_floor,
        phase=_phase_label,
        phase_class=_phase_class,
        in_order=_in_order,
        code=_code,
    )
    environment.globals.update(place_of=_place_of, source_at=_source_at, basis=units.BASIS)


def _lede(headline: str, title: str) -> str:
    """The headline without what the title says already."""
    rest = headline.removeprefix(title).lstrip(";. ")
    return rest[:1].upper() + rest[1:]


def _grow(seconds: float) -> str:
    """A length for flex-grow; below 1 in sum they would not fill the row."""
    return f"{1e6 * seconds:.3f}" if math.isfinite(seconds) and seconds > 0 else "0"


def _floor(seconds: float) -> str:
    """A floor of next to nothing is not worth its digits."""
    return units.duration(seconds) if seconds >= 1e-9 else "<1 ns"


def _rows(items: Sequence[object], most: int = _MOST_ROWS) -> Rows:
    return Rows(items[:most], max(0, len(items) - most))


def _phase_label(name: str) -> str:
    return LOOKS[name].label if name in LOOKS else name


def _phase_class(name: str) -> str:
    return name if name in PHASES else "other"


def _in_order(phases: dict[str, float]) -> list[tuple[str, float]]:
    """The phases that take time, in the order of a step."""
    names = [*LOOKS, *(name for name in phases if name not in LOOKS)]
    return [(name, phases[name]) for name in names if phases.get(name, 0.0) > 0][:24]


def _code(line: str) -> Markup:
    return highlighted(line)[0]


def _place_of(evidence: Evidence, source: Source | None) -> str:
    return _short(place_of(source, cwd=evidence.workload.cwd))


def _source_at(evidence: Evidence, index: int) -> str:
    return _place_of(evidence, evidence.source_of(index))


def _short(where: str) -> str:
    """A place that loses its beginning, not its end: a table has little room."""
    return where if len(where) <= _LONGEST_PLACE else f"\u2026{where[-_LONGEST_PLACE:]}"
