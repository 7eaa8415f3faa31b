"""Parts of a block that come out the same every time: whole assignments and what follows from them, or the largest expressions.

What "the same" means is for a lever to say: it is asked, with what an expression reads, why it may change.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.purity import Purity, Reads, words, written
from flatout.levers.syntax.source import Place, code_of, first_line

_CHEAP: Final = words("len range int float bool size dim numel item ndimension max min isinstance")

Depends = Callable[[Reads, frozenset[str]], str]
"""Told what an expression reads and which names are known to be constant: why it may change, '' if it cannot."""


class Constant(NamedTuple):
    """A statement that gives names to what comes out the same every time."""

    statement: cst.SimpleStatementLine
    targets: tuple[str, ...]
    value: cst.BaseExpression
    reads: frozenset[str]


def constants_of(
    place: Place,
    purity: Purity,
    depends: Depends,
    *,
    owner: str = "",
    me: str,
    times: Mapping[str, int] | None = None,
) -> list[Constant]:
    """The statements of the place's block that give names, once each, to what comes out the same."""
    scope = ast.parse(cst.Module(body=[place.function]).code) if place.function is not None else purity.tree
    times = times if times is not None else times_bound(scope)
    changed = written_names(scope)
    known: set[str] = set()
    found: list[Constant] = []
    for statement in place.block:
        targets, value = _assignment(statement)
        if value is None or any(times.get(t, 0) != 1 or t in changed for t in targets):
            continue
        try:
            reads = purity.reads(value, owner=owner, me=me)
        except EditError as e:
            if statement is place.statement:
                raise EditError(str(e)) from e
            continue
        why = depends(reads, frozenset(known))
        if why and statement is place.statement:
            raise EditError(why)
        if not why:
            assert isinstance(statement, cst.SimpleStatementLine)
            known |= set(targets)
            found.append(Constant(statement, targets, value, reads.names))
    return found


def group_of(constants: Sequence[Constant], anchor: Constant) -> list[Constant]:
    """The anchor, the constants that follow from it, and those that these need; in order."""
    chosen = {id(anchor)}
    for constant in constants:
        made = {t for c in constants if id(c) in chosen for t in c.targets}
        if constant.reads & made:
            chosen.add(id(constant))
    for constant in reversed(constants):
        needed = set().union(*(c.reads for c in constants if id(c) in chosen))
        if needed & set(constant.targets):
            chosen.add(id(constant))
    return [c for c in constants if id(c) in chosen]


def _assignment(statement: cst.CSTNode) -> tuple[tuple[str, ...], cst.BaseExpression | None]:
    """Names and value of a plain assignment on a line of its own."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return (), None
    [small] = statement.body
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return (), None
    target = small.targets[0].target
    if isinstance(target, cst.Name):
        return (target.value,), small.value
    if isinstance(target, cst.Tuple) and all(isinstance(e.value, cst.Name) for e in target.elements):
        return tuple(code_of(e.value) for e in target.elements), small.value
    return (), None


def largest_parts(
    statement: cst.CSTNode, purity: Purity, depends: Depends, changed: set[str], *, owner: str, me: str
) -> dict[cst.BaseExpression, str]:
    """The largest parts of a plain statement that come out the same and take work, and what each could be called.

    Raises EditError when there is none.
    """
    if not isinstance(statement, cst.SimpleStatementLine):
        raise EditError("it is no plain statement")
    for name in sorted(times_bound(ast.parse(cst.Module(body=[statement]).code)).keys() & changed):
        raise EditError(f"'{name}' is written to")
    finder = _Largest(lambda value: _is_constant(value, purity, depends, owner, me))
    statement.visit(finder)
    if not finder.found:
        raise EditError(f"nothing in '{first_line(cst.Module(body=()), statement)}' is sure to come out the same")
    return {value: name or _name_for(value) for value, name in finder.found.items()}


def _is_constant(value: cst.BaseExpression, purity: Purity, depends: Depends, owner: str, me: str) -> bool:
    if not has_work(value):
        return False
    try:
        return not depends(purity.reads(value, owner=owner, me=me), frozenset())
    except EditError:
        return False


class _Largest(cst.CSTVisitor):
    def __init__(self, is_wanted: Callable[[cst.BaseExpression], bool]) -> None:
        super().__init__()
        self.found: dict[cst.BaseExpression, str] = {}
        self._is_wanted = is_wanted
        self._keyword = ""

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Lambda, cst.BaseComp, cst.AssignTarget, cst.Del, cst.AugAssign)):
            return False
        if isinstance(node, cst.Arg):
            self._keyword = node.keyword.value if node.keyword is not None else ""
        is_work = isinstance(node, (cst.Call, cst.BinaryOperation, cst.Subscript, cst.UnaryOperation))
        if is_work and self._is_wanted(node):  # type: ignore[arg-type]
            self.found[node] = self._keyword  # type: ignore[index]
            return False
        return True


def has_work(value: cst.CSTNode) -> bool:
    """Whether anything is called that is not about sizes and numbers."""
    return any(last_callee(call) not in _CHEAP for call in m.findall(value, m.Call()))


def last_callee(value: cst.CSTNode) -> str:
    if not isinstance(value, cst.Call):
        return ""
    return code_of(value.func).rpartition(".")[2]


def _name_for(value: cst.CSTNode) -> str:
    """A name after the outermost function that is called."""
    calls = [value, *m.findall(value, m.Call())]
    name = next((c for c in map(last_callee, calls) if c and c not in ("to", "float", "unsqueeze", "view", "long")), "")
    for head in ("make_", "build_", "get_", "compute_", "create_", "_"):
        name = name.removeprefix(head)
    return {"arange": "positions", "tensor": "constant", "triu": "mask", "tril": "mask"}.get(name, name) or "constant"


def times_bound(tree: ast.AST) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found[node.id] = found.get(node.id, 0) + 1
    return found


def written_names(tree: ast.AST) -> set[str]:
    """Names of what is written to in place."""
    return {dotted.partition(".")[0] for dotted in written(tree)}
