"""Two runs compared: the answer, what else differs, phases, findings and lines."""

from __future__ import annotations

from typing import Final, Literal

from flatout.core import units
from flatout.core.records.comparison import (
    USUAL_FRACTION,
    Comparison,
    FindingChange,
    LineChange,
    Ratio,
    TimeChange,
)
from flatout.report.bars import phase_label
from flatout.report.document import NEVER, Block, Cell, Column, Heading, Table, numbers
from flatout.report.sanitise import CodeText, Path, Words, inert, place

_NUM_LINES: Final = 12
_CAVEAT: Final = "the interval speaks of the steps of these two runs; two runs of one script can differ by more"
_TONES: Final = {"more": "bold red", "less": "bold green", "unclear": "bold"}
_WHY: Final[dict[Literal["environment", "work", "command"], str]] = {
    "environment": "NOT THE SAME MACHINE OR VERSIONS: the ratio is not the script's doing alone",
    "work": "NOT THE SAME WORK IN A STEP: a ratio of steps is none of samples",
    "command": "run differently",
}
_KINDS: Final = {
    "appeared": Words("+ appeared", "red"),
    "vanished": Words("- vanished", "green"),
    "moved": Words("~ moved", "dim"),
    "stayed": Words("= stayed", "dim"),
}


def comparison_blocks(comparison: Comparison) -> list[Block]:
    """Say what changed between the runs, loudest first."""
    blocks: list[Block] = [Words(comparison_headline(comparison), style=_TONES[_direction(comparison)])]
    if comparison.changed_phases:
        blocks.append(Words(_changed_phases(comparison), style="bold"))
    for kind, why in _WHY.items():
        found = [f"{d.name} {d.before} -> {d.after}" for d in comparison.differences if d.kind == kind]
        if found:
            blocks.append(Words(f"{why}: {'; '.join(found)}", style="dim" if kind == "command" else "bold yellow"))
    blocks.append(Words(f"{comparison.num_before} and {comparison.num_after} steps timed; {_CAVEAT}", style="dim"))
    if comparison.moved_functions:
        blocks.append(Words(f"matched where they are now: {_moves(comparison)}", style="dim"))
    if comparison.phases:
        blocks += ["", _phases(comparison.phases)]
    if comparison.findings:
        blocks += ["", Heading("Findings"), _findings(comparison.findings)]
    if comparison.lines:
        blocks += ["", Heading("Lines"), _lines(comparison.lines)]
    for size in comparison.sizes:
        ratio = f", {size.after_bytes / size.before_bytes:.2f}x" if size.before_bytes else ""
        sizes = f"{units.size(size.before_bytes)} -> {units.size(size.after_bytes)}{ratio}"
        blocks += ["", f"memory at the peak, {size.device}: {sizes}"]
    return blocks


def comparison_headline(comparison: Comparison) -> str:
    """The answer in a sentence.

    Slower or faster are said only where the interval leaves no doubt.
    """
    step = comparison.step
    times = f"{units.duration(step.before_s)} -> {units.duration(step.after_s)} a step"
    ratio = step.ratio
    assert ratio is not None
    interval = "too few steps for an interval" if ratio.low is None else f"95 % interval {_ends(ratio, digits=3)}"
    if _direction(comparison) == "unclear":
        return f"No change seen: {times}, {ratio.value:.3f} of before; {interval}."
    small = abs(ratio.value - 1) < USUAL_FRACTION
    usual = "; two runs of one script can differ by so much" if small else ""
    speed = f"{ratio.value:.2f}x slower" if ratio.value > 1 else f"{1 / ratio.value:.2f}x faster"
    return f"{speed}: {times}; {interval} of before{usual}."


def phase_change(phase: TimeChange) -> str:
    """What became of a phase, in a few words: 'forward 40.0 ms -> 60.0 ms, 1.50x'."""
    name, before, after = phase_label(phase.name), units.duration(phase.before_s), units.duration(phase.after_s)
    if phase.ratio is None:
        return f"{name} gone, {before}" if phase.before_s > 0 else f"{name} new, {after}"
    return f"{name} {before} -> {after}, {_change(phase.ratio, phase.before_s)}"


def line_change(line: LineChange) -> str:
    """What became of a line, in a few words: '10.0 ms -> 30.0 ms of a step, 3.00x'; or 'new, 30.0 ms of a step'."""
    if line.line_before is None:
        return f"new, {units.duration(line.after_s)} of a step"
    if line.line_after is None:
        return f"gone, {units.duration(line.before_s)} of a step"
    times = f"{units.duration(line.before_s)} -> {units.duration(line.after_s)} of a step"
    return f"{times}, {_change(line.ratio, line.before_s)}"


def line_work(line: LineChange) -> str:
    """What else a line does in a step than before: '4 -> 8 operators, 1e+06 -> 2e+06 FLOP'; '' for the same."""
    calls = f"{line.calls_before:g} -> {line.calls_after:g} operators" if line.calls_before != line.calls_after else ""
    flop = f"{line.flop_before:.3g} -> {line.flop_after:.3g} FLOP" if line.flop_before != line.flop_after else ""
    return ", ".join(filter(None, [calls, flop]))


def decision_line(comparison: Comparison) -> str:
    """What was decided about the threshold, and why; one line."""
    decision, ratio = comparison.decision, comparison.step.ratio
    assert decision is not None and ratio is not None
    limit = units.percent(decision.threshold)
    if ratio.low is None or ratio.high is None:
        interval = f"fewer than six timed steps in a run ({comparison.num_before} and {comparison.num_after})"
    else:
        low, high = (f"{100 * (end - 1):+.1f} %" for end in (ratio.low, ratio.high))
        interval = f"95 % interval of the slowdown {low} to {high}"
    answers = {"slower": "FAIL: slower by", "not slower": "PASS: not slower by"}
    answer = answers.get(decision.outcome, "PASS, cannot tell whether slower by")
    is_elsewhere = any(d.kind == "environment" for d in comparison.differences)
    elsewhere = "; machine or versions differ, so this is not the script's doing alone" if is_elsewhere else ""
    return f"{answer} more than {limit}: {interval}{elsewhere}"


def _changed_phases(comparison: Comparison) -> str:
    is_within = _direction(comparison) == "unclear"
    lead = "phases that changed, although the step as a whole did not" if is_within else "phases that changed"
    return f"{lead}: {'; '.join(map(phase_change, comparison.changed_phases))}"


def _moves(comparison: Comparison) -> str:
    """Pairs of files, each once however many functions went there."""
    return ", ".join(dict.fromkeys(f"{m.file_before} -> {m.file_after}" for m in comparison.moved_functions))


def _direction(comparison: Comparison) -> Literal["more", "less", "unclear"]:
    return comparison.step.ratio.direction if comparison.step.ratio is not None else "unclear"


def _phases(phases: tuple[TimeChange, ...]) -> Table:
    unit = units.time_unit(max(max(p.before_s, p.after_s) for p in phases))
    rows: list[list[Cell]] = [
        [
            inert(phase_label(phase.name), ascii_only=True),
            unit.show(phase.before_s),
            unit.show(phase.after_s),
            Words(_change(phase.ratio, phase.before_s), _TONES[phase.ratio.direction] if phase.ratio else ""),
            _ends(phase.ratio),
        ]
        for phase in phases
    ]
    return Table([Column("phase"), *_changes(unit)], rows)


def _changes(unit: units.TimeUnit) -> tuple[Column, ...]:
    figures = numbers(f"before {unit.name}", f"after {unit.name}", "change")
    return (*figures, Column("95 % interval", is_whole=True))


def _findings(findings: tuple[FindingChange, ...]) -> Table:
    rows: list[list[Cell]] = []
    for change in findings:
        finding = change.after or change.before
        assert finding is not None
        kind = _KINDS[change.kind]
        title: list[Words | CodeText] = [Words(f"{finding.title} {_where(change)}", kind.style)]
        if finding.text and change.kind != "stayed":
            title.append(CodeText(finding.text))
        costs = [units.duration(f.cost_s) for f in (change.before, change.after) if f is not None]
        rows.append([kind, [*title], " -> ".join(costs), finding.rule])
    return Table([Column(is_whole=True), Column(), *numbers(""), Column(from_width=NEVER)], rows)


def _where(change: FindingChange) -> str:
    sides = ((change.before, change.file_before), (change.after, change.file_after))
    shown = [place(file, f.line, cwd="") or "the whole step" for f, file in sides if f is not None]
    return " -> ".join(dict.fromkeys(shown))


def _lines(lines: tuple[LineChange, ...]) -> Table:
    unit = units.time_unit(max(max(line.before_s, line.after_s) for line in lines))
    rows: list[list[Cell]] = [
        [
            Path(f"{inert(line.file)}:{line.line_after or line.line_before}"),
            unit.show(line.before_s) if line.line_before is not None else units.UNKNOWN,
            unit.show(line.after_s) if line.line_after is not None else units.UNKNOWN,
            _line_change(line),
            _ends(line.ratio),
            CodeText(line.text),
        ]
        for line in lines[:_NUM_LINES]
    ]
    left = len(lines) - _NUM_LINES
    rest = [f"and {left} more"] if left > 0 else []
    return Table([Column("line"), *_changes(unit), Column("code")], rows, rest=rest)


def _line_change(line: LineChange) -> str:
    if line.line_before is None:
        return "new"
    return "gone" if line.line_after is None else _change(line.ratio, line.before_s)


def _change(ratio: Ratio | None, before_s: float) -> str:
    if ratio is None:
        return "gone" if before_s > 0 else "new"
    return f"{ratio.value:.2f}x"


def _ends(ratio: Ratio | None, *, digits: int = 2) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    return f"{ratio.low:.{digits}f} - {ratio.high:.{digits}f}"
