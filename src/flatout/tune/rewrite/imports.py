"""The imports at the head of a file: what names mean by them, adding or removing one, statements below them or at the start."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence

import libcst as cst
from libcst import matchers as m

from flatout.tune.rewrite.source import code_of, nodes_of, spaced, statements, with_expression


def call_name(module: cst.Module, node: cst.CSTNode) -> str:
    """The full name of a callee, by the file's imports: 'torch.nn.functional.softmax' for `F.softmax`; '' if unknown."""
    dotted = code_of(node)
    if not all(part.isidentifier() for part in dotted.split(".")):
        return ""
    full = full_name(imported_names(ast.parse(module.code)), dotted)
    return "" if full.startswith(".") else full


def full_name(imported: Mapping[str, str], dotted: str) -> str:
    """The full name of `a.b` where `a` is imported, from '.' on where that is relative; '' where it is not."""
    head, _, rest = dotted.partition(".")
    return ".".join(filter(None, (imported[head], rest))) if head in imported else ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Names that imports bind anywhere in the file, and what they stand for; '.name' for one that is imported relatively."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                found[name.asname or name.name] = f".{name.name}" if node.level else f"{node.module}.{name.name}"
    return found


def dotted_name(node: ast.AST) -> str:
    """The text 'a.b.c' of names and attributes, '' of anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted_name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def with_import(module: cst.Module, name: str, member: str | None = None, *, alias: str | None = None) -> cst.Module:
    """The tree with `import name [as alias]`, or `from name import member`, at its head if it is not there."""
    from libcst.codemod import CodemodContext
    from libcst.codemod.visitors import AddImportsVisitor

    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, name, member, asname=alias)
    changed = AddImportsVisitor(context).transform_module(module)
    if len(changed.body) == len(module.body):
        return changed
    what = f"from {name} import {member}" if member else f"import {name}"
    return _with_line(module, f"{what} as {alias}" if alias else what)


def without_unused_import(module: cst.Module, name: str, member: str | None = None) -> cst.Module:
    """The tree without this import, if nothing uses it any more; what follows a docstring keeps its distance."""
    from libcst.codemod import CodemodContext
    from libcst.codemod.visitors import RemoveImportsVisitor

    context = CodemodContext()
    RemoveImportsVisitor.remove_unused_import(context, name, member)
    changed = RemoveImportsVisitor(context).transform_module(module)
    if len(changed.body) in (1, len(module.body)) or changed.get_docstring() is None:
        return changed
    return changed.with_changes(body=[changed.body[0], spaced(changed.body[1], 1), *changed.body[2:]])


def with_torch(module: cst.Module) -> tuple[cst.Module, str]:
    """The tree with torch imported, and its name there."""
    for node in nodes_of(cst.ImportAlias, module):
        alias = node.evaluated_alias or "torch"
        if node.evaluated_name == "torch" and call_name(module, cst.Name(alias)) == "torch":
            return module, alias
    return with_import(module, "torch"), "torch"


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


def with_start(module: cst.Module, template: str) -> cst.Module:
    """The tree with statements where the script starts.

    Where nothing at the top works before `if __name__ == "__main__":`, that is first in there; or in the one function of the
    file that it calls, if that is its last statement. Else it is below the imports and constants.
    """
    new = statements(template)
    block = _main_block(module)
    if block is None:
        return below_imports(module, new)
    main = _main(module, block)
    if main is None:
        return with_expression(module, block, block.with_changes(body=[*new, *block.body]))
    at = 1 if main.get_docstring() is not None else 0
    body = main.body.with_changes(body=[*main.body.body[:at], *new, *main.body.body[at:]])
    return with_expression(module, main, main.with_changes(body=body))


def _main_block(module: cst.Module) -> cst.IndentedBlock | None:
    """What is in `if __name__ == "__main__":`, if the top of the file does nothing but define besides."""
    found: cst.BaseSuite | None = None
    for statement in module.body:
        if isinstance(statement, cst.If) and "__name__" in code_of(statement.test):
            found = statement.body
        elif not isinstance(statement, (cst.FunctionDef, cst.ClassDef, cst.SimpleStatementLine)):
            return None
    return found if isinstance(found, cst.IndentedBlock) else None


def _main(module: cst.Module, block: cst.IndentedBlock) -> cst.FunctionDef | None:
    """The one function of the file that a block calls, in its last statement."""
    functions = {s.name.value: s for s in module.body if isinstance(s, cst.FunctionDef)}
    called = [{code_of(call.func) for call in nodes_of(cst.Call, s)} & functions.keys() for s in block.body]
    names = set().union(*called)
    if len(names) != 1 or not called[-1]:
        return None
    [name] = names
    return functions[name] if isinstance(functions[name].body, cst.IndentedBlock) else None


def _with_line(module: cst.Module, line: str) -> cst.Module:
    """The tree with one more import line: to its kind (standard library, others), in the order of the alphabet."""
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
    """The index before the first import that comes after it in order, else after the last."""
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
        name, form = code_of(found.names[0].name), 0
    else:
        assert isinstance(found, cst.ImportFrom)
        name = "." * len(found.relative) + (code_of(found.module) if found.module else "")
        form = 1
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


def _is_constant(statement: cst.CSTNode) -> bool:
    """Whether it gives a name to something that is not computed by a call."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and all(isinstance(s, cst.Assign) for s in statement.body)
        and not m.findall(statement, m.Call())
    )
