"""The report in Markdown, short enough for a pull request; what came from the script cannot become markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flatout.records.evidence import Evidence
from flatout.records.finding import Diagnosis, RankedFinding
from flatout.reporting import units
from flatout.reporting.bars import LOOKS
from flatout.reporting.inert import inert, inert_code, place, place_of
from flatout.reporting.memory import memory_cost, memory_gain, memory_line
from flatout.reporting.text import circumstances, exit_message, headline, observing_cost

_MOST_FINDINGS: Final = 10
_MOST_NOTES: Final = 20
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_MARKS: Final = re.compile(r"[\\`*_\[\]#|~$)+\-.=]")
_LINKED: Final = re.compile(r"(?i)(@|\bwww\b|\bhttps?\b|\bftp\b|\bmailto\b|\\#)")
"""Where GitHub begins a mention, a link or a reference to an issue; an empty comment after it stops that."""


def markdown_report(evidence: Evidence, diagnosis: Diagnosis) -> str:
    """Headline, causes with place, gain and edit; the rest folded away."""
    blocks = [f"### flatout: {plain(headline(evidence, diagnosis))}"]
    if message := exit_message(evidence):
        blocks.append(f"**{plain(message)}**")
    blocks += list(_phases(evidence))
    cwd = evidence.workload.cwd
    shown = diagnosis.findings[:_MOST_FINDINGS]
    blocks += [_finding(finding, rank=rank, cwd=cwd) for rank, finding in enumerate(shown, start=1)]
    if len(diagnosis.findings) > len(shown):
        blocks.append(f"and {len(diagnosis.findings) - len(shown)} more")
    blocks.append(_details(evidence, diagnosis))
    return "\n\n".join(blocks) + "\n"


def plain(text: str) -> str:
    """`text` in one line, so that Markdown shows it as it stands.

    >>> print(plain("a_b <script> [x](y) @ada #12"))
    a\\_b &lt;script&gt; \\[x\\](y) @<!-- -->ada \\#<!-- -->12
    """
    text = "".join(_ENTITIES.get(c, c) for c in inert(text))
    text = _MARKS.sub(lambda m: m[0] if _is_harmless(text, m.start()) else f"\\{m[0]}", text)
    return _LINKED.sub(r"\1<!-- -->", text)


def _is_harmless(text: str, at: int) -> bool:
    """Whether this mark could begin a list or a heading only at the start of a line, and is not there."""
    begins_list = text[:at].isdigit() and text[at + 1 : at + 2] in ("", " ")
    return text[at] in ".)-+=" and at > 0 and not begins_list


def code(text: str) -> str:
    """`text` in one line as a code span, whatever backquotes it holds; not for tables, which end at a bar.

    >>> print(code("x = `a`"))
    `` x = `a` ``
    """
    text = inert_code(text).strip()
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in text or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _phases(evidence: Evidence) -> Iterator[str]:
    """One row of a table: the phases in order with their share."""
    phases = evidence.steps.phases
    names = [n for n in (*LOOKS, *(n for n in phases if n not in LOOKS)) if phases.get(n, 0.0) > 0]
    if not names:
        return
    total_s = sum(phases[n] for n in names)
    head = " | ".join(plain(LOOKS[n].label if n in LOOKS else n) for n in names)
    row = " | ".join(f"{units.duration(phases[n])}, {units.percent(phases[n] / total_s)}" for n in names)
    yield f"| {head} |\n|{'---|' * len(names)}\n| {row} |"


def _finding(finding: RankedFinding, *, rank: int, cwd: str) -> str:
    where = place(finding.file, finding.line, cwd=cwd)
    how = units.BASIS[finding.basis]
    gain = f"{units.speedup(finding.gain)} faster ({how})" if finding.saves_time else memory_gain(finding)
    cost = f"{units.duration(finding.cost_s)} of each step, {units.percent(finding.share)}; {finding.regime}-bound"
    stakes = [*([cost] if finding.saves_time else []), *memory_cost(finding)]
    lines = [
        f"**{rank}. {plain(finding.title)}** - {gain}",
        f"{code(where) if where else 'the whole step, no single line'}: {'; '.join(stakes)}",
    ]
    body = ["<br>\n".join(lines)]
    if finding.text:
        body.append(_fenced([finding.text], language="python"))
    if finding.because:
        body.append(plain(finding.because))
    if finding.edit.strip():
        edit = finding.edit.expandtabs(4).splitlines()
        body.append(f"Edit: {plain(edit[0])}" if len(edit) == 1 else "Edit:\n\n" + _fenced(edit, language="text"))
    return "\n\n".join(body)


def _fenced(lines: list[str], *, language: str) -> str:
    text = "\n".join(inert_code(line) for line in lines)
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _details(evidence: Evidence, diagnosis: Diagnosis) -> str:
    cwd = evidence.workload.cwd
    rows = [plain(line) for line in circumstances(evidence)]
    rows += [plain(line) for m in evidence.memory[:8] if (line := memory_line(m, name_it=len(evidence.memory) > 1))]
    if evidence.steps.num_timed and diagnosis.unexplained_s > 0:
        rows.append(f"unexplained: {units.duration(diagnosis.unexplained_s)} of each step")
    for note in diagnosis.notes[:_MOST_NOTES]:
        where = place_of(note.where, cwd=cwd)
        rows.append(f"also true: {code(where) + ' ' if where else ''}{plain(note.text)}")
    rows += [f"not tried: {plain(line)}" for line in diagnosis.refused[:_MOST_NOTES]]
    rows += [f"not seen: {plain(line)}" for line in evidence.notes[:_MOST_NOTES]]
    if diagnosis.checked:
        rows.append(f"checked and found in order: {plain(', '.join(diagnosis.checked))}")
    if cost := observing_cost(evidence):
        rows.append(f"observing: {plain(cost)}")
    items = "\n".join(f"- {row}" for row in rows)
    return f"<details>\n<summary>How it was measured, and what else is true</summary>\n\n{items}\n\n</details>"
