"""What tuning found, as one HTML file: its report with a bar for the step after each lever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flatout.core import units
from flatout.core.records.plan import Plan, Tuned
from flatout.report.document import Block, Fold, Heading
from flatout.report.html.bars import Bar, Chart, Piece
from flatout.report.html.document import CodeLines, PageBlock, document_page
from flatout.report.parts.ladder import TOGETHER, UNTOUCHED, Row, guarantee_words, ladder_blocks, ladder_rows

_NOT_RUN: Final = (
    "# NOT VERIFIED: nothing has run this text yet; `flatout edit` compares it with the script before it prints it"
)


def ladder_html(tuned: Tuned, *, commands: Sequence[str] = (), diff: Sequence[str] = ()) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file.

    `commands` are what to type to use the plan, `diff` the lines of its levers as a change of the script's text, which nothing
    has run yet.
    """
    title, *blocks = ladder_blocks(tuned)
    extra: list[PageBlock] = []
    if chart := ladder_chart(ladder_rows(tuned)) if tuned.plan.lever else None:
        extra.append(chart)
    if tuned.plan.lever and commands:
        extra.append(CodeLines("How to use it", tuple(commands)))
    rest: list[PageBlock] = []
    if words := guarantee_words(tuned):
        rest += [Heading("What the guarantee says"), words]
    if tuned.plan.lever and diff:
        rest.append(CodeLines("The change as a diff", (_NOT_RUN, *diff), is_diff=True))
    return document_page([title, *extra, *_levers_first(blocks, rest)], command=command_of(tuned.plan))


def _levers_first(blocks: Sequence[Block], rest: Sequence[PageBlock]) -> list[PageBlock]:
    """The report's blocks, `rest` before the first that is folded away."""
    at = next((index for index, block in enumerate(blocks) if isinstance(block, Fold)), len(blocks))
    return [*blocks[:at], *rest, *blocks[at:]]


def command_of(plan: Plan) -> str:
    """The script with its arguments."""
    return " ".join((plan.script, *plan.arguments))


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
