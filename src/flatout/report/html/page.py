"""The whole page: records and figures into the template. All text goes through autoescape, and is made inert before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis, HotLine
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import bytes_by_kind
from flatout.report.bars import phase_label, phases_in_order
from flatout.report.html.code import edit, excerpt, highlighted
from flatout.report.html.figure import PHASES
from flatout.report.html.manual import manual
from flatout.report.html.memory import memory_svg
from flatout.report.html.roofline import roofline_svg
from flatout.report.html.steps import steps_svg
from flatout.report.html.template import rendered_page
from flatout.report.html.timeline import timeline_svg
from flatout.report.parts import diagnosis as words
from flatout.report.parts.breakdown import of_floor, part_name, share_of_step
from flatout.report.parts.floor import WITHOUT_FLOOR, kernel_name, kernel_shapes, shown_kernels
from flatout.report.parts.load import load_message
from flatout.report.places import chain_of, innermost_place
from flatout.report.sanitise import place_of

_MOST_ROWS: Final = 12
"""Rows of a table that are shown; the rest is counted."""
_MOST_FINDINGS: Final = 40
_LONGEST_PLACE: Final = 40


class ShownRows(NamedTuple):
    """The first rows of a table, and how many more there are."""

    shown: Sequence[object]
    num_more: int


def html_report(evidence: Evidence, diagnosis: Diagnosis) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file.

    Lines around a finding are read from its source file where that file is here and still holds the line that ran.
    """
    lines: tuple[HotLine, ...] = diagnosis.hot_lines[:_MOST_ROWS]
    headline = words.diagnosis_headline(evidence, diagnosis)
    step_name = words.STEP_NAMES[evidence.steps.kind]
    return rendered_page(
        "page",
        filters=_FILTERS,
        evidence=evidence,
        diagnosis=diagnosis,
        causes=words.causes(evidence, diagnosis)[:_MOST_FINDINGS],
        headline=headline,
        lede=_lede(headline, words.step_title(evidence)),
        step_name=step_name,
        circumstances=tuple(words.run_circumstances(evidence)),
        failure=words.exit_message(evidence),
        load=load_message(evidence),
        observing=words.observing_cost(evidence),
        timeline=timeline_svg(evidence, diagnosis.findings),
        roofline=roofline_svg(evidence, lines),
        hot_lines=lines,
        kernels=shown_kernels(diagnosis),
        without_floor=WITHOUT_FLOOR,
        memory=[
            (m, bytes_by_kind(m.at_peak), memory_svg(m, name=f"memory{i}")) for i, m in enumerate(evidence.memory[:8])
        ],
        steps=steps_svg(evidence.steps),
        place_of=_place_of,
        chain_of=lambda of, source: chain_of(source, cwd=of.workload.cwd),
        innermost=lambda of, source: _short(innermost_place(source, cwd=of.workload.cwd)),
        source_at=lambda of, index: _place_of(of, of.source_of(index)),
        share_of_step=share_of_step,
        basis=units.BASIS,
    )


def _lede(headline: str, title: str) -> str:
    """The headline without what the title says already."""
    rest = headline.removeprefix(title).lstrip(";., ")
    return rest[:1].upper() + rest[1:]


def _grow(seconds: float) -> str:
    """A length for flex-grow; below 1 in sum they would not fill the row."""
    return f"{1e6 * seconds:.3f}" if math.isfinite(seconds) and seconds > 0 else "0"


def _floor(seconds: float) -> str:
    """A floor of next to nothing is not worth its digits."""
    return units.duration(seconds) if seconds >= 1e-9 else "<1 ns"


def _rows(items: Sequence[object], most: int = _MOST_ROWS) -> ShownRows:
    return ShownRows(items[:most], max(0, len(items) - most))


def _in_order(phases: dict[str, float]) -> list[tuple[str, float]]:
    """The phases that take time, in the order of a step."""
    return list(phases_in_order(phases).items())[:24]


def _code(line: str) -> Markup:
    return highlighted(line)[0]


def _place_of(evidence: Evidence, source: Source | None) -> str:
    """A place that loses its beginning, not its end: a table has little room."""
    return _short(place_of(source, cwd=evidence.workload.cwd))


def _short(where: str) -> str:
    return where if len(where) <= _LONGEST_PLACE else f"\u2026{where[-_LONGEST_PLACE:]}"


_FILTERS: Final[dict[str, Callable[..., object]]] = {
    "grow": _grow,
    "rows": _rows,
    "floor": _floor,
    "phase": phase_label,
    "phase_class": lambda name: name if name in PHASES else "other",
    "in_order": _in_order,
    "code": _code,
    "excerpt": excerpt,
    "edit": edit,
    "manual": manual,
    "part_name": part_name,
    "of_floor": of_floor,
    "kernel_name": kernel_name,
    "kernel_shapes": kernel_shapes,
}
