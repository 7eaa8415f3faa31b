"""Where a script starts to work, and statements put there: in the function that it calls at its end, or below its imports."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst import matchers as m

from flatout.levers.syntax.source import code_of, statements, with_expression


def with_start(module: cst.Module, template: str) -> cst.Module:
    """The tree with statements where the script starts: first in the function that `if __name__ == "__main__":` calls, if it
    calls one of the file's own and nothing at the top works before; else below the imports and constants.
    """
    new = statements(template)
    main = _main(module)
    if main is not None:
        at = 1 if main.get_docstring() is not None else 0
        body = main.body.with_changes(body=[*main.body.body[:at], *new, *main.body.body[at:]])
        return with_expression(module, main, main.with_changes(body=body))
    return below_imports(module, new)


def below_imports(module: cst.Module, new: Sequence[cst.BaseStatement], *, num_after: int = 1) -> cst.Module:
    """The tree with statements below the imports and constants at its top, and at least so many blank lines after them."""
    body = list(module.body)
    at = max((i + 1 for i, s in enumerate(body) if _is_import(s)), default=int(module.get_docstring() is not None))
    while at < len(body) and _is_constant(body[at]):
        at += 1
    first = spaced(new[0], 1) if at and not (_is_constant(body[at - 1]) and _is_constant(new[0])) else new[0]
    rest: list[cst.BaseStatement] = list(body[at:])
    if rest:
        rest[0] = spaced(rest[0], num_after)
    return module.with_changes(body=[*body[:at], first, *new[1:], *rest])


def spaced(statement: cst.CSTNode, number: int) -> cst.BaseStatement:
    """The statement with at least so many blank lines above it, and above the comments that belong to it."""
    lines = statement.leading_lines  # type: ignore[attr-defined]
    missing = number - sum(line.comment is None for line in lines)
    blank = [cst.EmptyLine(indent=False)] * max(0, missing)
    return statement.with_changes(leading_lines=[*blank, *lines])  # type: ignore[return-value]


def _main(module: cst.Module) -> cst.FunctionDef | None:
    """The file's function that its `if __name__ == "__main__":` calls, if the top of the file does nothing but define."""
    functions = {s.name.value: s for s in module.body if isinstance(s, cst.FunctionDef)}
    found: cst.FunctionDef | None = None
    for statement in module.body:
        if isinstance(statement, cst.If) and "__name__" in code_of(statement.test):
            for call in m.findall(statement.body, m.Call(func=m.Name())):
                assert isinstance(call, cst.Call) and isinstance(call.func, cst.Name)
                found = functions.get(call.func.value, found)
        elif not isinstance(statement, (cst.FunctionDef, cst.ClassDef, cst.SimpleStatementLine)):
            return None
    return found if found is not None and isinstance(found.body, cst.IndentedBlock) else None


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], (cst.Import, cst.ImportFrom)
    )


def _is_constant(statement: cst.CSTNode) -> bool:
    """Whether it gives a name to something that is not computed by a call."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and all(isinstance(s, cst.Assign) for s in statement.body)
        and not m.findall(statement, m.Call())
    )
