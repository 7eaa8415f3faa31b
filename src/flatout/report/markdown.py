"""Reports in Markdown, for a pull request; what came from the script cannot become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from flatout.core import units
from flatout.report.bars import phase_label, phases_in_order
from flatout.report.document import Block, Cause, Cell, Drawing, Fold, Heading, Listing, Phases, Table
from flatout.report.sanitise import CodeText, Path, Words, inert, inert_code

_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_MARKS: Final = re.compile(r"[\\`*_\[\]#|~$)+\-.=]")
_CODE_MARKS: Final = str.maketrans({character: f"&#{ord(character)};" for character in "&\\`*_[]<>|#@~$"})
"""What could end a code element or its cell, or mean something within it; all in one pass, so that nothing is escaped twice."""
_LINKED: Final = re.compile(r"(?i)(@|\bwww\b|\bhttps?\b|\bftp\b|\bmailto\b|\\#)")
"""Where GitHub begins a mention, a link or a reference to an issue; an empty comment after it stops that."""


def markdown_report(blocks: Iterable[Block]) -> str:
    """Draw all blocks but figures as Markdown."""
    return _joined(blocks) + "\n"


def _joined(blocks: Iterable[Block]) -> str:
    return "\n\n".join(filter(None, map(_shown, blocks)))


def plain(text: str) -> str:
    """`text` in one line, so that Markdown shows it as it stands.

    >>> print(plain("a_b <script> [x](y) @ada #12"))
    a\\_b &lt;script&gt; \\[x\\](y) @<!-- -->ada \\#<!-- -->12
    """
    text = _entities(text)
    text = _MARKS.sub(lambda m: m[0] if _is_harmless(text, m.start()) else f"\\{m[0]}", text)
    return _LINKED.sub(r"\1<!-- -->", text)


def _entities(text: str) -> str:
    """The text in one line, as HTML shows it as it stands."""
    return "".join(_ENTITIES.get(c, c) for c in inert(text))


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


def _shown(block: Block) -> str:
    match block:
        case Heading(text, is_title=is_title):
            return f"### flatout: {plain(text)}" if is_title else f"**{plain(text)}**"
        case Table():
            return "\n\n".join(["\n".join(_table(block)), *map(plain, block.rest)])
        case Listing(items):
            return "\n".join(f"- {f'{label}: ' if label else ''}{_cell(words)}" for label, words in items)
        case Phases(seconds):
            return _phases(phases_in_order(seconds))
        case Cause():
            return _cause(block)
        case Fold(title, blocks):
            return f"<details>\n<summary>{_entities(title)}</summary>\n\n{_joined(blocks)}\n\n</details>"
        case Drawing():
            return ""
        case _:
            return _cell(block)


def _cell(cell: Cell) -> str:
    match cell:
        case list():
            return "<br>".join(map(_cell, cell))
        case CodeText(text) | Path(text):
            return _code_element(text)
        case Words(text, style):
            return f"**{plain(text)}**" if "bold" in style else plain(text)
        case _:
            return plain(cell)


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(plain(column.head) for column in table.columns)} |"
    yield f"|{'|'.join('--:' if column.is_number else '---' for column in table.columns)}|"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in table.rows)


def _phases(phases: dict[str, float]) -> str:
    """One row of a table: the phases in order with their share."""
    total_s = sum(phases.values())
    head = " | ".join(plain(phase_label(name)) for name in phases)
    row = " | ".join(f"{units.duration(s)}, {units.percent(s / total_s)}" for s in phases.values())
    return f"| {head} |\n|{'---|' * len(phases)}\n| {row} |" if phases else ""


def _cause(cause: Cause) -> str:
    finding = cause.finding
    gain = " ".join(filter(None, (*cause.gain, f"({units.BASIS[finding.basis]})" if finding.saves_time else "")))
    lines = [
        f"**{cause.number}. {plain(finding.title)}** - {gain}",
        f"{code(cause.where) if cause.where else 'the whole step, no single line'}: "
        f"{'; '.join(filter(None, (cause.cost, *map(plain, cause.memory))))}",
    ]
    body = ["<br>\n".join(lines)]
    if cause.code:
        body.append(_fenced([cause.code], language="python"))
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


def _code_element(text: str) -> str:
    """Code that cannot leave its cell: an HTML element, since a span of back-ticks can be closed from within."""
    return f"<code>{inert(text).translate(_CODE_MARKS)}</code>"
