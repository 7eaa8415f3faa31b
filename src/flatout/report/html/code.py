"""Source in the report: a few highlighted lines around a finding, and its edit as a diff where the edit is code."""

from __future__ import annotations

import ast
import linecache
import stat
import tokenize
import warnings
from pathlib import Path
from textwrap import dedent
from typing import Final, Literal, NamedTuple

from markupsafe import Markup

from flatout.core.records.finding import RankedFinding
from flatout.core.records.workload import CELL
from flatout.core.runtime.notebook import lines_of_cell
from flatout.report.places import innermost_text
from flatout.report.sanitise import inert_code

_AROUND: Final = 3
"""Lines shown above and below."""
_MOST_LINES: Final = 24
_LONGEST_LINE: Final = 400
_MOST_EDIT_LINES: Final = 40
_LARGEST_FILE_BYTES: Final = 1 << 20


class ExcerptLine(NamedTuple):
    """One line of an excerpt: `role` is 'here' for the finding's own line, 'also' for others that it names."""

    number: int
    code: Markup
    role: Literal["", "here", "also"] = ""


class Change(NamedTuple):
    """One line of an edit: prose, code to write, or a line of a diff."""

    kind: Literal["text", "code", "old", "new"]
    text: str | Markup


def highlighted(text: str) -> tuple[Markup, ...]:
    """The lines of `text` as highlighted Python; everything in it is escaped."""
    from pygments import highlight
    from pygments.formatters.html import HtmlFormatter
    from pygments.lexers.python import PythonLexer

    lines = [_cut(inert_code(line)) for line in text.split("\n")]
    shown = highlight("\n".join(lines), PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
    pieces = str(shown).split("\n")[: len(lines)]
    return tuple(Markup(piece) for piece in pieces)


def excerpt(finding: RankedFinding) -> tuple[ExcerptLine, ...]:
    """The lines around the finding, from its file if that still says what ran; else the line as it was recorded."""
    if finding.via:
        return (ExcerptLine(finding.via[-1].line, highlighted(innermost_text(finding))[0], "here"),)
    if not finding.text.strip():
        return ()
    also = {s.line: s.text for s in finding.also if s.file == finding.file}
    lines = _lines_of(finding.file)
    here = finding.line
    if not 0 < here <= len(lines) or lines[here - 1].strip() != finding.text.strip():
        return (ExcerptLine(here, highlighted(finding.text)[0], "here"),)
    near = [n for n in also if abs(n - here) <= _MOST_LINES // 3]
    first = max(1, min([here, *near]) - _AROUND)
    last = min(len(lines), max([here, *near]) + _AROUND)
    while first < here and not lines[first - 1].strip():
        first += 1
    while last > here and not lines[last - 1].strip():
        last -= 1
    code = highlighted(dedent("\n".join(lines[first - 1 : last]).expandtabs(4)))
    return tuple(
        ExcerptLine(n, piece, "here" if n == here else "also" if n in also else "")
        for n, piece in zip(range(first, last + 1), code, strict=False)
    )


def edit(finding: RankedFinding) -> tuple[Change, ...]:
    """What to change: a diff when the edit rewrites the finding's line, else its lines, indented ones as code."""
    new = _rewritten(finding.text, finding.edit)
    if new is not None:
        return (Change("old", highlighted(finding.text.strip())[0]), Change("new", highlighted(new)[0]))
    changes = []
    for line in finding.edit.expandtabs(4).splitlines()[:_MOST_EDIT_LINES]:
        if not line.strip():
            continue
        is_code = line.startswith(" ") or _is_code(line)
        changes.append(Change("code", highlighted(line)[0]) if is_code else Change("text", line))
    return tuple(changes)


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def _rewritten(text: str, edit: str) -> str | None:
    """The finding's line after the edit, when the edit is code for this very line.

    It is when it assigns to the same names, when both return, or when it is a call `f(..., key=value)` of a function that the
    line calls: the ellipsis stands for the arguments there are.
    """
    text, edit = text.strip(), edit.strip()
    old, new = _statement(text), _statement(edit)
    if old is None or new is None or "\n" in text or "\n" in edit:
        return None
    if isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        return _with_keywords(text, old, new.value)
    if isinstance(old, ast.Assign) and isinstance(new, ast.Assign):
        is_same = [ast.unparse(t) for t in old.targets] == [ast.unparse(t) for t in new.targets]
        return edit if is_same and edit != text else None
    return edit if isinstance(old, ast.Return) and isinstance(new, ast.Return) and edit != text else None


def _with_keywords(text: str, old: ast.stmt, wanted: ast.Call) -> str | None:
    """`text` with the keywords of `f(..., key=value)` added to its call of f; None when it has no such call."""
    is_pattern = len(wanted.args) == 1 and isinstance(wanted.args[0], ast.Constant) and wanted.args[0].value is ...
    if not is_pattern or not wanted.keywords or any(k.arg is None for k in wanted.keywords) or not text.isascii():
        return None
    name = ast.unparse(wanted.func).rpartition(".")[2]
    calls = [n for n in ast.walk(old) if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] == name]
    if len(calls) != 1 or calls[0].end_col_offset is None:
        return None
    present = {k.arg for k in calls[0].keywords}
    added = ", ".join(ast.unparse(k) for k in wanted.keywords)
    if present & {k.arg for k in wanted.keywords}:
        return None
    end = calls[0].end_col_offset - 1
    before = text[:end].rstrip()
    comma = "" if before.endswith("(") else " " if before.endswith(",") else ", "
    return f"{before}{comma}{added}{text[end:]}"


def _statement(text: str) -> ast.stmt | None:
    """The one statement that `text` is; None when it is prose, or several."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the script's odd escapes are not ours to complain about
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return body[0] if len(body) == 1 else None


def _is_code(text: str) -> bool:
    """Whether a line on its own is Python that does something; a bare word or a sentence is not."""
    statement = _statement(text.strip())
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return statement is not None and not isinstance(statement, ast.AnnAssign)


def _lines_of(file: str) -> tuple[str, ...]:
    """The lines of a source file or of a cell; none when it is no file of a reasonable size, or cannot be read."""
    if CELL.fullmatch(Path(file).name):
        return tuple(line.rstrip("\n") for line in linecache.getlines(file)) or lines_of_cell(file)
    try:
        path = Path(file)
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE_BYTES:
            return ()
        with tokenize.open(file) as source:
            return tuple(source.read().split("\n"))
    except (OSError, SyntaxError, ValueError):  # gone, unreadable, or not the text it says it is
        return ()
