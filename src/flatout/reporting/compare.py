"""Two runs compared, for a terminal and as Markdown for a pull request: records in, a drawing or text out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.records.comparison import Comparison, FindingChange, LineChange, Ratio, TimeChange
from flatout.records.finding import RankedFinding
from flatout.reporting import units
from flatout.reporting.bars import LOOKS
from flatout.reporting.inert import Code, Path, Words, inert, place

_WIDTH: Final = 100
_NUM_LINES: Final = 12
_INSET: Final = (0, 0, 0, 2)
_USUAL_FRACTION: Final = 0.04
"""Two runs of one script on a shared machine differ by up to this (diagnosis.SMALLEST_FRACTION)."""
_CAVEAT: Final = "the interval speaks of the steps of these two runs; two runs of one script can differ by more"
_TONES: Final = {"more": "bold red", "less": "bold green", "unclear": "bold"}
_WHY: Final[dict[Literal["environment", "work", "command"], str]] = {
    "environment": "NOT THE SAME MACHINE OR VERSIONS: the ratio is not the script's doing alone",
    "work": "NOT THE SAME WORK IN A STEP: a ratio of steps is none of samples",
    "command": "run differently",
}
_KINDS: Final = {"appeared": "+", "vanished": "-", "moved": "~", "stayed": "="}


def comparison_report(comparison: Comparison) -> RenderableType:
    """What changed, at most 100 columns wide; text that came from a script is shown inert."""
    parts: list[RenderableType] = [Words(headline(comparison), style=_TONES[_direction(comparison)])]
    parts += _circumstances(comparison)
    if comparison.phases:
        parts += ["", Padding(_phases(comparison.phases), _INSET)]
    if comparison.findings:
        parts += ["", Text("Findings", style="bold"), Padding(_findings(comparison.findings), _INSET)]
    if comparison.lines:
        parts += ["", Text("Lines", style="bold"), Padding(_lines(comparison.lines), _INSET)]
    for size in comparison.sizes:
        ratio = f", {size.after_bytes / size.before_bytes:.2f}x" if size.before_bytes else ""
        sizes = f"{units.size(size.before_bytes)} -> {units.size(size.after_bytes)}{ratio}"
        parts += ["", Words(f"memory at the peak, {size.device}: {sizes}")]
    return Constrain(Group(*parts), width=_WIDTH)


def headline(comparison: Comparison) -> str:
    """The answer in a sentence.

    Slower or faster are said only where the interval leaves no doubt.
    """
    step = comparison.step
    times = f"{units.duration(step.before_s)} -> {units.duration(step.after_s)} a step"
    assert step.ratio is not None
    direction = _direction(comparison)
    if direction == "unclear":
        why = "too few steps for an interval" if step.ratio.low is None else _interval(step.ratio)
        return f"No change seen: {times}, {step.ratio.value:.3f} of before; {why}."
    small = abs(step.ratio.value - 1) < _USUAL_FRACTION
    usual = "; two runs of one script can differ by so much" if small else ""
    return f"{_speed(step.ratio)}: {times}; {_interval(step.ratio)} of before{usual}."


def decision_line(comparison: Comparison) -> str:
    """What was decided about the threshold, and why; one line."""
    decision, ratio = comparison.decision, comparison.step.ratio
    assert decision is not None and ratio is not None
    limit = units.percent(decision.threshold)
    if ratio.low is None or ratio.high is None:
        interval = f"fewer than six timed steps in a run ({comparison.num_before} and {comparison.num_after})"
    else:
        interval = f"95 % interval of the slowdown {_percent(ratio.low)} to {_percent(ratio.high)}"
    if decision.outcome == "slower":
        text = f"FAIL: slower by more than {limit}: {interval}"
    elif decision.outcome == "not slower":
        text = f"PASS: not slower by more than {limit}: {interval}"
    else:
        text = f"PASS, cannot tell whether slower by more than {limit}: {interval}"
    if any(d.kind == "environment" for d in comparison.differences):
        text += "; machine or versions differ, so this is not the script's doing alone"
    return text


def comparison_markdown(comparison: Comparison) -> str:
    """The same as Markdown: for a pull request's comment or a CI job's summary."""
    return "\n".join(_markdown(comparison)) + "\n"


def _direction(comparison: Comparison) -> Literal["more", "less", "unclear"]:
    return comparison.step.ratio.direction if comparison.step.ratio is not None else "unclear"


def _circumstances(comparison: Comparison) -> Iterator[RenderableType]:
    """What differs besides the times, loudest first, and how much was seen."""
    for kind, why in _WHY.items():
        found = [f"{d.name} {d.before} -> {d.after}" for d in comparison.differences if d.kind == kind]
        if found:
            yield Words(f"{why}: {'; '.join(found)}", style="dim" if kind == "command" else "bold yellow")
    yield Words(f"{comparison.num_before} and {comparison.num_after} steps timed; {_CAVEAT}", style="dim")


def _phases(phases: tuple[TimeChange, ...]) -> Table:
    unit = units.time_unit(max(max(p.before_s, p.after_s) for p in phases))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("phase")
    for header in ("before", "after", "change"):
        table.add_column(f"{header} {unit.name}" if header != "change" else header, justify="right", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    for phase in phases:
        look = LOOKS.get(phase.name)
        ratio = phase.ratio
        table.add_row(
            look.label if look is not None else inert(phase.name, ascii_only=True),
            unit.show(phase.before_s),
            unit.show(phase.after_s),
            Text(_change(ratio, phase.before_s), style=_TONES[ratio.direction] if ratio is not None else ""),
            _ends(ratio),
        )
    return table


def _findings(findings: tuple[FindingChange, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    for change in findings:
        finding = change.after or change.before
        assert finding is not None
        style = {"appeared": "red", "vanished": "green"}.get(change.kind, "dim")
        code = [Code(finding.text)] if finding.text and change.kind != "stayed" else []
        title = Words(f"{finding.title}  {_where(change)}", style=style)
        table.add_row(Text(f"{_KINDS[change.kind]} {change.kind}", style=style), Group(title, *code), _stake(change))
    return table


def _where(change: FindingChange) -> str:
    sides = ((change.before, change.file_before), (change.after, change.file_after))
    shown = [place(file, f.line, cwd="") or "the whole step" for f, file in sides if f is not None]
    return " -> ".join(dict.fromkeys(shown))


def _stake(change: FindingChange) -> str:
    """What the cause takes of a step."""
    costs = [units.duration(f.cost_s) for f in (change.before, change.after) if f is not None]
    return " -> ".join(costs)


def _lines(lines: tuple[LineChange, ...]) -> Group:
    unit = units.time_unit(max(max(line.before_s, line.after_s) for line in lines))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("line", overflow="fold", max_width=40)
    for header in (f"before {unit.name}", f"after {unit.name}", "change"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    table.add_column("code", ratio=1)
    for line in lines[:_NUM_LINES]:
        table.add_row(
            Path(_place(line), style="cyan"),
            unit.show(line.before_s) if line.line_before is not None else units.UNKNOWN,
            unit.show(line.after_s) if line.line_after is not None else units.UNKNOWN,
            _line_change(line),
            _ends(line.ratio),
            Code(line.text),
        )
    left = len(lines) - _NUM_LINES
    return Group(table, *([Words(f"and {left} more", style="dim")] if left > 0 else []))


def _place(line: LineChange) -> str:
    now = line.line_after or line.line_before
    return f"{inert(line.file)}:{now}"


def _line_change(line: LineChange) -> str:
    if line.line_before is None:
        return "new"
    return "gone" if line.line_after is None else _change(line.ratio, line.before_s)


def _change(ratio: Ratio | None, before_s: float) -> str:
    if ratio is None:
        return "gone" if before_s > 0 else "new"
    return f"{ratio.value:.2f}x"


def _ends(ratio: Ratio | None) -> str:
    return "" if ratio is None or ratio.low is None or ratio.high is None else f"{ratio.low:.2f} - {ratio.high:.2f}"


def _interval(ratio: Ratio) -> str:
    assert ratio.low is not None and ratio.high is not None
    return f"95 % interval {ratio.low:.3f} - {ratio.high:.3f}"


def _speed(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x slower" if ratio.value > 1 else f"{1 / ratio.value:.2f}x faster"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _markdown(comparison: Comparison) -> Iterator[str]:
    yield f"**{headline(comparison)}**"
    if comparison.decision is not None:
        yield from ("", decision_line(comparison))
    for kind, why in _WHY.items():
        found = [d for d in comparison.differences if d.kind == kind]
        if found:
            yield from ("", f"{'**' if kind != 'command' else ''}{why}{'**' if kind != 'command' else ''}", "")
            yield from (f"- {_cell(d.name)}: {_code(d.before)} -> {_code(d.after)}" for d in found)
    if comparison.phases:
        yield from ("", "| phase | before | after | change | 95 % interval |", "|---|--:|--:|--:|---|")
        for phase in comparison.phases:
            look = LOOKS.get(phase.name)
            name = look.label if look is not None else _cell(phase.name)
            times = f"{units.duration(phase.before_s)} | {units.duration(phase.after_s)}"
            yield f"| {name} | {times} | {_change(phase.ratio, phase.before_s)} | {_ends(phase.ratio)} |"
    if comparison.findings:
        yield from ("", "| finding | where | takes of a step | |", "|---|---|--:|---|")
        for change in comparison.findings:
            yield f"| {_markdown_finding(change)} | {_code(_where(change))} | {_stake(change)} | {change.kind} |"
    if comparison.lines:
        yield from ("", "| line | before | after | change | 95 % interval | code |", "|---|--:|--:|--:|---|---|")
        for line in comparison.lines[:_NUM_LINES]:
            times = f"{units.duration(line.before_s)} | {units.duration(line.after_s)}"
            change_ = f"{_line_change(line)} | {_ends(line.ratio)}"
            yield f"| {_code(_place(line))} | {times} | {change_} | {_code(line.text)} |"
    for size in comparison.sizes:
        yield from (
            "",
            f"Memory at the peak, {size.device}: {units.size(size.before_bytes)} -> {units.size(size.after_bytes)}",
        )
    yield from ("", f"{comparison.num_before} and {comparison.num_after} steps timed; {_CAVEAT}.")


def _markdown_finding(change: FindingChange) -> str:
    finding: RankedFinding | None = change.after or change.before
    assert finding is not None
    return f"{_cell(finding.title)} ({_code(finding.rule)})"


def _cell(text: str) -> str:
    """Text that cannot leave its cell or become markup."""
    shown = inert(text)
    for mark in "\\`*_[]<>|#@":
        shown = shown.replace(mark, f"&#{ord(mark)};")
    return shown


def _code(text: str) -> str:
    """A code span that cannot leave its cell: an HTML element, since a span of back-ticks can be closed from within."""
    return f"<code>{_cell(text)}</code>"
