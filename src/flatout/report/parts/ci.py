"""A comparison for CI systems: annotations of the lines that became slower, and cases of JUnit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flatout.core import units
from flatout.core.records.comparison import Comparison, FindingChange, LineChange, TimeChange
from flatout.report.bars import phase_label
from flatout.report.github import Annotation, Level
from flatout.report.junit import JunitCase
from flatout.report.parts.compare import (
    comparison_blocks,
    comparison_headline,
    decision_line,
    line_change,
    line_work,
    phase_change,
)
from flatout.report.text import plain_text

_RUN = "flatout"


def comparison_annotations(comparison: Comparison, *, file_in: Callable[[str], str]) -> Iterator[Annotation]:
    """What became slower: the step, then the lines, then causes that appeared; nothing where nothing did.

    Lines and causes are named only where the step, or a phase of it, is slower beyond doubt. Where the decision is that the step
    is slower, that and the lines that are slower for certain are errors; all else are warnings. `file_in` gives the path within
    the repository of a file as the comparison names it, '' for one outside.
    """
    if not comparison.is_slower:
        return
    is_failure = comparison.decision is not None and comparison.decision.outcome == "slower"
    level: Level = "error" if is_failure else "warning"
    slower = [phase_change(p) for p in comparison.changed_phases if p.change_s > 0]
    answer = decision_line(comparison) if comparison.decision is not None else comparison_headline(comparison)
    yield Annotation(level, f"{_RUN}: {comparison_headline(comparison)}", "\n".join([answer, *slower]))
    appeared = [f for f in comparison.findings if f.kind == "appeared" and f.after is not None and f.after.line > 0]
    on_line = {(f.file_after, f.after.line): f for f in reversed(appeared) if f.after is not None}
    lines = [(line, on_line.pop((line.file, line.line_after or 0), None)) for line in comparison.slower_lines]
    for line, cause in sorted(lines, key=lambda pair: not _is_certain(*pair)):
        yield _of_line(line, cause, level=level if _is_certain(line, cause) else "warning", file=file_in(line.file))
    for found in appeared:
        if found.after is not None and on_line.get((found.file_after, found.after.line)) is found:
            yield _of_finding(found, file=file_in(found.file_after))


def _is_certain(line: LineChange, cause: FindingChange | None) -> bool:
    return line.is_certainly_slower or cause is not None


def _of_line(line: LineChange, cause: FindingChange | None, *, level: Level, file: str) -> Annotation:
    lines = [f"{line.file}:{line.line_after}: {line.text}", *filter(None, [line_change(line), line_work(line)])]
    if cause is not None and cause.after is not None:
        lines += [f"{cause.after.title}: {cause.after.because}", *cause.after.edit.splitlines()]
    return Annotation(level, f"{_RUN}: {line_change(line)}", "\n".join(lines), file, line.line_after or 0)


def _of_finding(found: FindingChange, *, file: str) -> Annotation:
    finding = found.after
    assert finding is not None
    lines = [f"{found.file_after}:{finding.line}: {finding.text}", finding.because, *finding.edit.splitlines()]
    cost = f", {units.duration(finding.cost_s)} of a step" if finding.cost_s else ""
    return Annotation("warning", f"{_RUN}: {finding.title}{cost}", "\n".join(lines), file, finding.line)


def comparison_cases(comparison: Comparison) -> list[JunitCase]:
    """The step and each of its phases as a case; they fail where the decision is that the step is slower, and else never.

    Where it is, the phases fail that became slower. A step of which it cannot be told is skipped. The time of a case is that in
    a step of the run after.
    """
    decision, step = comparison.decision, comparison.step
    report = plain_text(comparison_blocks(comparison))
    line = decision_line(comparison) if decision is not None else ""
    outcome = decision.outcome if decision is not None else "not slower"
    if outcome == "slower":
        whole = JunitCase("step", "failed", report, f"{comparison_headline(comparison)} {line}", step.after_s)
    elif outcome == "cannot tell":
        whole = JunitCase("step", "skipped", report, line, step.after_s)
    else:
        whole = JunitCase("step", "passed", report, seconds=step.after_s)
    slower = {p.name for p in comparison.changed_phases if p.change_s > 0} if outcome == "slower" else set()
    return [whole, *(_case_of_phase(phase, is_slower=phase.name in slower) for phase in comparison.phases)]


def _case_of_phase(phase: TimeChange, *, is_slower: bool) -> JunitCase:
    name, text = f"phase: {phase_label(phase.name)}", phase_change(phase)
    if is_slower:
        return JunitCase(name, "failed", text, text, phase.after_s)
    return JunitCase(name, "passed", text, seconds=phase.after_s)
