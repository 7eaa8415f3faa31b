"""A notebook's code cells as Python: what is no Python (magics, lines for a shell, help) is left out, and said."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from flatout.core.errors import ScriptError

SUFFIX: Final = ".ipynb"
_BODY_IS_PYTHON: Final = ("capture", "flatout", "time")
"""Magics of a whole cell whose other lines run as they would without."""
_STATEMENT: Final = re.compile(r"%time\s+(?P<statement>\S.*)")
_NO_PYTHON: Final = re.compile(
    r"""[%!]                             # %matplotlib inline, !pip install
      | get_ipython\(\)                  # what a magic is written as in an exported notebook
      | \?{1,2}[\w.*]+\s*$               # ?name
      | [\w.*]+\?{1,2}\s*$               # name?
      | [\w.,\s\[\]]+ = \s* [%!]       # files = !ls
    """,
    re.VERBOSE,
)


class _StoredCell(msgspec.Struct):
    cell_type: str
    source: str | list[str] = ""


class _Language(msgspec.Struct):
    language: str = ""
    name: str = ""


class _Metadata(msgspec.Struct):
    kernelspec: _Language = msgspec.field(default_factory=_Language)
    language_info: _Language = msgspec.field(default_factory=_Language)


class _StoredNotebook(msgspec.Struct):
    nbformat: int
    cells: list[_StoredCell] | msgspec.UnsetType = msgspec.UNSET
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class NotebookCell(NamedTuple):
    """A code cell that is not empty: its number as Jupyter counts when all are run, its Python, and what was left out of it."""

    number: int
    text: str
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The cell as reports name it: 'cell 3'."""
        return f"cell {self.number}"


def read_notebook(path: Path) -> tuple[NotebookCell, ...]:
    """The code cells of a notebook of Python, in order.

    Raises ScriptError when it cannot be read, is no notebook of format 4, holds another language, or no code.
    """
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_StoredNotebook)
    except OSError as e:
        raise ScriptError(f"cannot read '{path}': {e.strerror or e}; give a notebook that Jupyter opens") from e
    except msgspec.DecodeError as e:
        raise ScriptError(f"'{path}' is no notebook: {e}; give one that Jupyter opens") from e
    if stored.nbformat < 4 or isinstance(stored.cells, msgspec.UnsetType):
        raise ScriptError(f"'{path}' has the notebook format {stored.nbformat}, not 4; save it again with Jupyter")
    known = stored.metadata
    language = known.kernelspec.language or known.language_info.name or "python"
    if language.lower() not in ("python", "ipython"):
        raise ScriptError(f"'{path}' is a notebook of {language}; give one of Python")
    texts = [
        c.source if isinstance(c.source, str) else "".join(c.source) for c in stored.cells if c.cell_type == "code"
    ]
    cells = tuple(_cell(number, text) for number, text in enumerate(filter(str.strip, texts), start=1))
    if not cells:
        raise ScriptError(f"'{path}' holds no code; give a notebook with code cells")
    return cells


def lines_of_cell(file: str) -> tuple[str, ...]:
    """The lines of a cell that counts as the file 'notebook.ipynb/cell 3', as the notebook has them now; () where it has none."""
    folder, name = os.path.split(file)
    if not folder.endswith(SUFFIX):
        return ()
    try:
        cells = read_notebook(Path(folder))
    except ScriptError:  # it was moved or changed since
        return ()
    return next((tuple(cell.text.split("\n")) for cell in cells if cell.name == name), ())


def _cell(number: int, text: str) -> NotebookCell:
    lines = text.split("\n")
    first = next(index for index, line in enumerate(lines) if line.strip())
    left_out: list[str] = []
    if lines[first].startswith("%%"):
        magic = lines[first][2:].partition(" ")[0].strip()
        if magic not in _BODY_IS_PYTHON:
            return NotebookCell(number, "", (f"cell {number} is no Python and was left out: {lines[first].strip()}",))
        lines[first] = ""
    for index in _lines_without_python(lines):
        line = lines[index]
        indent = line[: len(line) - len(line.lstrip())]
        timed = _STATEMENT.fullmatch(line.strip())
        if timed is not None:
            lines[index] = indent + timed["statement"]
            continue
        left_out.append(f"cell {number}, line {index + 1} is no Python and was left out: {line.strip()}")
        lines[index] = f"{indent}pass"
        last = index
        while line.rstrip().endswith("\\") and last + 1 < len(lines):
            last += 1
            line, lines[last] = lines[last], ""
    return NotebookCell(number, "\n".join(lines), tuple(left_out))


def _lines_without_python(lines: list[str]) -> Iterator[int]:
    """The lines that IPython alone understands; `lines` may be changed above the next one meanwhile."""
    for index in range(len(lines)):
        if _NO_PYTHON.match(lines[index].lstrip()) and not _is_inside("\n".join(lines[:index])):
            yield index


def _is_inside(text: str) -> bool:
    """Whether a text ends within brackets, a string of several lines, or a line that goes on: what follows is no line's start.

    >>> _is_inside("x = (7"), _is_inside("x = 7")
    (True, False)
    """
    try:
        for _ in tokenize.generate_tokens(io.StringIO(f"{text}\n").readline):
            pass
    except tokenize.TokenError:
        return True
    except SyntaxError:  # an indentation that fits nothing: compiling it says so
        return False
    return text.endswith("\\")
