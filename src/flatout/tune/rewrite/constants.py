"""Parts of a block that come out the same every time: whole assignments and what follows from them, or the largest expressions.

What "the same" means is for a lever to say: it is asked, with what an expression reads, why it may change.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst

from flatout.core.errors import EditError
from flatout.tune.rewrite.enclosing_blocks import assignment
from flatout.tune.rewrite.purity import Purity, Reads, written
from flatout.tune.rewrite.source import SourcePlace, code_of, first_line, nodes_of, word_set

_CHEAP: Final = word_set("len range int float bool size dim numel item ndimension max min isinstance")

Depends = Callable[[Reads, frozenset[str]], str]
"""Called with what an expression reads and the names known to be constant: returns why it may change, '' if it cannot."""


class PlainAssignment(NamedTuple):
    """A statement that assigns a value to plain names, and the names that the value is made of."""

    statement: cst.SimpleStatementLine
    targets: tuple[str, ...]
    value: cst.BaseExpression
    reads: frozenset[str]


def constant_assignments(
    place: SourcePlace,
    purity: Purity,
    depends: Depends,
    *,
    owner: str = "",
    me: str,
    times: Mapping[str, int] | None = None,
) -> list[PlainAssignment]:
    """Statements of the place's block that assign constants to names that are assigned once."""
    scope = ast.parse(cst.Module(body=[place.function]).code) if place.function is not None else purity.tree
    times = times if times is not None else times_bound(scope)
    changed = written_names(scope)
    known: set[str] = set()
    found: list[PlainAssignment] = []
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
            found.append(PlainAssignment(statement, targets, value, reads.names))
    return found


def connected(assignments: Sequence[PlainAssignment], anchor: PlainAssignment) -> list[PlainAssignment]:
    """The anchor, the assignments that follow from it, and those that these need; in order."""
    selected = {id(anchor)}
    for one in assignments:
        bound = {t for a in assignments if id(a) in selected for t in a.targets}
        if one.reads & bound:
            selected.add(id(one))
    for one in reversed(assignments):
        needed = set().union(*(a.reads for a in assignments if id(a) in selected))
        if needed & set(one.targets):
            selected.add(id(one))
    return [a for a in assignments if id(a) in selected]


def _assignment(statement: cst.CSTNode) -> tuple[tuple[str, ...], cst.BaseExpression | None]:
    """Names and value of a plain assignment on a line of its own."""
    target, value = assignment(statement) or (None, None)
    if isinstance(target, cst.Name):
        return (target.value,), value
    if isinstance(target, cst.Tuple) and all(isinstance(e.value, cst.Name) for e in target.elements):
        return tuple(code_of(e.value) for e in target.elements), value
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
    found = list(_largest(statement, lambda value: _is_constant(value, purity, depends, owner, me)))
    if not found:
        raise EditError(f"nothing in '{first_line(cst.Module(body=()), statement)}' is sure to come out the same")
    return {value: name or _name_for(value) for value, name in found}


def _is_constant(value: cst.BaseExpression, purity: Purity, depends: Depends, owner: str, me: str) -> bool:
    if not has_work(value):
        return False
    try:
        return not depends(purity.reads(value, owner=owner, me=me), frozenset())
    except EditError:
        return False


def _largest(
    node: cst.CSTNode, is_wanted: Callable[[cst.BaseExpression], bool], keyword: str = ""
) -> Iterator[tuple[cst.BaseExpression, str]]:
    """The largest wanted expressions in a node, each with the keyword that it is passed by."""
    if isinstance(node, (cst.Lambda, cst.BaseComp, cst.AssignTarget, cst.Del, cst.AugAssign)):
        return
    if isinstance(node, cst.Arg):
        keyword = node.keyword.value if node.keyword is not None else ""
    if isinstance(node, (cst.Call, cst.BinaryOperation, cst.Subscript, cst.UnaryOperation)) and is_wanted(node):
        yield node, keyword
        return
    for child in node.children:
        yield from _largest(child, is_wanted, keyword)


def has_work(value: cst.CSTNode) -> bool:
    """Whether anything is called that is not about sizes and numbers."""
    return any(last_callee(call) not in _CHEAP for call in nodes_of(cst.Call, value))


def last_callee(value: cst.CSTNode) -> str:
    """The bare name of the function that a call calls; '' for anything else."""
    if not isinstance(value, cst.Call):
        return ""
    return code_of(value.func).rpartition(".")[2]


def _name_for(value: cst.CSTNode) -> str:
    """A name after the outermost function that is called."""
    calls = [value, *nodes_of(cst.Call, value)]
    name = next((c for c in map(last_callee, calls) if c and c not in ("to", "float", "unsqueeze", "view", "long")), "")
    for head in ("make_", "build_", "get_", "compute_", "create_", "_"):
        name = name.removeprefix(head)
    return {"arange": "positions", "tensor": "constant", "triu": "mask", "tril": "mask"}.get(name, name) or "constant"


def times_bound(tree: ast.AST) -> dict[str, int]:
    """Number of times that each bare name is bound or deleted in a tree."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Counter(name.id for name in names if not isinstance(name.ctx, ast.Load))


def written_names(tree: ast.AST) -> set[str]:
    """Bare names of objects that are written to in place."""
    return {dotted.partition(".")[0] for dotted in written(tree)}
