"""A loop that does nothing but updates, as one call of all of them: `update.each([...])`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.tune.rewrite.enclosing_blocks import Loop, only_small
from flatout.tune.rewrite.source import bare_names, code_of, names_in, nodes_of, statements, with_changes
from flatout.tune.rewrite.updates import UpdateStatements

_LONG: Final = 90
"""Characters of a call, above which its arguments get lines of their own."""
_PURE: Final = (cst.Name, cst.Integer, cst.BinaryOperation, cst.Subscript)
_PARTS: Final = ("split", "chunk")


def in_one_call(
    loops: Sequence[Loop],
    block: Sequence[cst.BaseStatement],
    found: UpdateStatements,
    update: str,
    arguments: Sequence[str],
    scope: cst.CSTNode,
) -> cst.BaseStatement | None:
    """What stands for the innermost loop, with the arguments of all its updates in a list; None where the loop does more.

    The loop counts, or goes over the parts of a tensor, and cuts what the update gets by that; what it binds is read nowhere
    else in `scope`, the function or the file.
    """
    loop = loops[0]
    if (
        len(loops) < 2
        or not isinstance(loop, cst.For)
        or loop.orelse is not None
        or not isinstance(loop.target, cst.Name)
    ):
        return None
    if (
        block is not loop.body.body
        or found.before
        or found.after
        or found.last != len(block) - 1
        or not _counts(loop.iter)
    ):
        return None
    cut = _cut(block[: found.first])
    if cut is None:
        return None
    own = {id(one) for one in bare_names(loop)}
    if any(id(one) not in own for name in (loop.target.value, *cut) for one in _uses(scope, name)):
        return None
    values = [code_of(cut[name]) if name in cut else name for name in arguments]
    row = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
    over = f"for {loop.target.value} in {code_of(loop.iter)}"
    is_long = len(update) + len(row) + len(over) > _LONG
    rows = f"\n    {row}\n    {over}\n" if is_long else f"{row} {over}"
    [call] = statements(f"{update}.each([{rows}])\n")
    return call.with_changes(leading_lines=loop.leading_lines)


def _uses(scope: cst.CSTNode, name: str) -> Iterator[cst.Name]:
    """Where a name is read or bound, but for comprehensions that bind it for themselves."""
    comprehensions = m.findall(scope, m.GeneratorExp() | m.ListComp() | m.SetComp() | m.DictComp())
    own = {
        id(one)
        for node in comprehensions
        if any(name in names_in(part.target) for part in nodes_of(cst.CompFor, node))
        for one in bare_names(node)
    }
    return (one for one in bare_names(scope) if one.value == name and id(one) not in own)


def _counts(source: cst.BaseExpression) -> bool:
    """Whether a loop goes over numbers, or over the parts of a tensor."""
    is_of_parts = m.Call(func=m.Attribute(value=m.Name(), attr=m.OneOf(*(m.Name(one) for one in _PARTS))))
    return m.matches(source, m.Call(func=m.Name("range")) | is_of_parts)


def _cut(block: Sequence[cst.BaseStatement]) -> dict[str, cst.BaseExpression] | None:
    """What names are bound to, in terms of what the statements do not bind; None where they do more than cut and count."""
    found: dict[str, cst.BaseExpression] = {}
    for statement in block:
        small = only_small(statement)
        if not isinstance(small, cst.Assign) or len(small.targets) != 1 or not _is_pure(small.value):
            return None
        target = small.targets[0].target
        if not isinstance(target, cst.Name) or target.value in found or target.value in names_in(small.value):
            return None
        found[target.value] = _with_values(small.value, found)
    return found


def _is_pure(value: cst.BaseExpression) -> bool:
    """Whether an expression is made of names, whole numbers, arithmetic and indices alone."""
    expressions = m.findall(value, m.MatchIfTrue(lambda node: isinstance(node, cst.BaseExpression)))
    return all(isinstance(one, _PURE) for one in expressions)


def _with_values(value: cst.BaseExpression, values: Mapping[str, cst.BaseExpression]) -> cst.BaseExpression:
    """The expression with names replaced by what they are bound to."""
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for name in bare_names(value):
        if (known := values.get(name.value)) is not None:
            is_simple = isinstance(known, (cst.Name, cst.Integer, cst.Subscript))
            changes[name] = known if is_simple else known.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return with_changes(value, changes) if changes else value
