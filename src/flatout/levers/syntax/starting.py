"""Where a script starts to work, and statements put there: in the function that it calls at its end, or below its imports."""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m

from flatout.levers.syntax.imports import below_imports
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
