"""What tuning found, as one HTML file: its report with a bar for the step after each lever."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.core import units
from flatout.core.records.plan import Tuned
from flatout.report.html.bars import Bar, Chart, Piece
from flatout.report.html.document import document_page
from flatout.report.parts.ladder import TOGETHER, UNTOUCHED, Row, ladder_blocks, ladder_rows


def ladder_html(tuned: Tuned) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file."""
    title, *blocks = ladder_blocks(tuned)
    chart = ladder_chart(ladder_rows(tuned)) if tuned.plan.lever else None
    charts = [chart] if chart is not None else []
    return document_page([title, *charts, *blocks], command=" ".join((tuned.plan.script, *tuned.plan.arguments)))


def ladder_chart(steps: Sequence[Row]) -> Chart | None:
    """A bar for the step after each lever, with its interval, all on one scale; None where no step was timed."""
    timed = [(row, row.step_s) for row in steps if row.step_s is not None]
    if len(timed) < 2:
        return None
    longest_s = max(step_s[2] for _, step_s in timed)
    bars = tuple(_bar(row, step_s, longest_s) for row, step_s in timed)
    return Chart(bars, title="A step after each lever, and all together, with 95 % intervals")


def _bar(row: Row, seconds: tuple[float, float, float], longest_s: float) -> Bar:
    step_s, low_s, high_s = seconds
    tip = f"{row.name}: {units.duration(step_s)} a step, {units.duration(low_s)} to {units.duration(high_s)}"
    style = {UNTOUCHED: "bg-named", TOGETHER: "bg-optimizer"}.get(row.name, "bg-accent")
    return Bar(
        name=row.name,
        value=row.step,
        pieces=(Piece(style, tip, 1.0),),
        fraction=step_s / longest_s,
        label=tip,
        interval=(low_s / longest_s, high_s / longest_s) if high_s > low_s else None,
    )
