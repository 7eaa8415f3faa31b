"""Where a new import goes among those of a file: to its kind (standard library, others), in the order of the alphabet."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import libcst as cst

from flatout.errors import EditError


def with_import_line(module: cst.Module, line: str) -> cst.Module:
    """The tree with one more import line at its head."""
    new = cst.parse_statement(line, config=module.config_for_parsing)
    body = list(module.body)
    at = _place(body, new)
    above = body[at - 1] if at else None
    below = body[at] if at < len(body) else None
    if _is_of_kind(above, new):
        pass
    elif below is not None and _is_of_kind(below, new):
        new, body[at] = new.with_changes(leading_lines=_lines(below)), below.with_changes(leading_lines=())
    else:
        blank = [cst.EmptyLine(indent=False)]
        new = new.with_changes(leading_lines=blank if above is not None else ())
        if below is not None and not _lines(below):
            body[at] = below.with_changes(leading_lines=blank)
    return module.with_changes(body=[*body[:at], new, *body[at:]])


def _place(body: Sequence[cst.CSTNode], new: cst.CSTNode) -> int:
    """Before the first import of the head that comes after it in order, else after the last."""
    at = 0
    for index, statement in enumerate(body):
        if _is_import(statement):
            if _key(statement) > _key(new):
                return index
            at = index + 1
        elif not _is_docstring(statement):
            break
    return at or sum(map(_is_docstring, body[:1]))


def _key(statement: cst.CSTNode) -> tuple[int, int, str]:
    """Future, standard library or others; `import` before `from`; the module's name."""
    assert isinstance(statement, cst.SimpleStatementLine)
    found = statement.body[0]
    if isinstance(found, cst.Import):
        name, form = cst.Module(()).code_for_node(found.names[0].name), 0
    elif isinstance(found, cst.ImportFrom):
        name = "." * len(found.relative) + (cst.Module(()).code_for_node(found.module) if found.module else "")
        form = 1
    else:
        raise EditError("what is to be imported is no import")
    top = name.split(".")[0]
    kind = 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 3 if name.startswith(".") else 2
    return kind, form, name.lower()


def _is_of_kind(statement: cst.CSTNode | None, new: cst.CSTNode) -> bool:
    return statement is not None and _is_import(statement) and _key(statement)[0] == _key(new)[0]


def _lines(statement: cst.CSTNode) -> Sequence[cst.EmptyLine]:
    lines: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
    return lines


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], (cst.Import, cst.ImportFrom)
    )


def _is_docstring(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        getattr(statement.body[0], "value", None), (cst.SimpleString, cst.ConcatenatedString)
    )
