"""What lies around a statement of a syntax tree: the blocks that hold it, what they change in place, what else reads a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider

from flatout.levers.syntax.source import assigned_in, names_in

Node = TypeVar("Node", bound=cst.CSTNode)
Parents = Mapping[cst.CSTNode, cst.CSTNode]
Loop = cst.For | cst.While


class Level(NamedTuple):
    """A block around a statement: `owner` is what it is the body of, `at` says where in it the statement lies."""

    owner: cst.CSTNode
    block: Sequence[cst.BaseStatement]
    at: int

    @property
    def statement(self) -> cst.BaseStatement:
        """The statement of this block that is, or holds, the one asked for."""
        return self.block[self.at]


def parents_of(module: cst.Module) -> Parents:
    """The node above each node of the tree."""
    return MetadataWrapper(module, unsafe_skip_copy=True).resolve(ParentNodeProvider)


def levels(parents: Parents, node: cst.CSTNode) -> Iterator[Level]:
    """The blocks around a node in its own function (or the file), innermost first."""
    while node in parents:
        above = parents[node]
        if isinstance(above, (cst.IndentedBlock, cst.Module)):
            owner = parents[above] if isinstance(above, cst.IndentedBlock) else above
            assert isinstance(node, cst.BaseStatement)
            yield Level(owner, above.body, next(i for i, s in enumerate(above.body) if s is node))
            if isinstance(owner, (cst.FunctionDef, cst.ClassDef, cst.Module)):
                return
            above = owner
        node = above


def only_small(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """What a line holds when it holds one small statement."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def assignment(statement: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """(target, value) of a plain assignment to one target; None for anything else."""
    small = only_small(statement)
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        return small.targets[0].target, small.value
    return None


def root_name(node: cst.CSTNode) -> str:
    """The bare name that `a.b[c].d` starts with; '' when it starts with something else."""
    while isinstance(node, (cst.Attribute, cst.Subscript, cst.Call)):
        node = node.func if isinstance(node, cst.Call) else node.value
    return node.value if isinstance(node, cst.Name) else ""


def changed_in_place(node: cst.CSTNode | Sequence[cst.CSTNode]) -> set[str]:
    """Names whose object is changed: `x += 1`, `x[i] = 1`, `x.a = 1`, `x.add_(1)`, `f(out=x)`, `del x[i]`."""
    found: set[str] = set()
    for one in [node] if isinstance(node, cst.CSTNode) else node:
        for target in m.findall(one, m.AssignTarget() | m.AnnAssign() | m.For() | m.Del()):
            for inner in m.findall(target.target, m.Subscript() | m.Attribute()):  # type: ignore[attr-defined]
                found.add(root_name(inner))
        found |= {root_name(a.target) for a in m.findall(one, m.AugAssign())}  # type: ignore[attr-defined]
        for call in m.findall(one, m.Call(func=m.Attribute())):
            assert isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)
            name = call.func.attr.value
            if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
                found.add(root_name(call.func))
        for out in m.findall(one, m.Arg(keyword=m.Name("out"))):
            found |= names_in(out)
    return found - {""}


def captured(module: cst.Module, function: cst.FunctionDef | None) -> set[str]:
    """Names that functions inside a function (or any function, for the file itself) take from around themselves."""
    found: set[str] = set()
    scope: cst.CSTNode = function.body if function is not None else module
    for inner in m.findall(scope, m.FunctionDef() | m.Lambda()):
        assert isinstance(inner, (cst.FunctionDef, cst.Lambda))
        own = names_in(inner.params)
        if isinstance(inner, cst.FunctionDef) and not m.findall(inner, m.Global() | m.Nonlocal()):
            own |= assigned_in(inner.body)
        found |= names_in(inner.body) - own
    if function is not None:
        found |= {i.name.value for s in m.findall(function.body, m.Global() | m.Nonlocal()) for i in s.names}  # type: ignore[attr-defined]
    return found


def scope_of(module: cst.Module, function: cst.FunctionDef | None) -> cst.CSTNode:
    """What a name of this function, or of the file, is known in."""
    return function.body if function is not None else module


def occurrences(node: cst.CSTNode | Iterable[cst.CSTNode], name: str) -> list[cst.Name]:
    """Where a bare name stands (no attributes, no keywords of calls)."""
    found = _Occurrences(name)
    for one in [node] if isinstance(node, cst.CSTNode) else node:
        one.visit(found)
    return found.found


def used_outside(scope: cst.CSTNode, loop: cst.For, names: Iterable[str]) -> set[str]:
    """Which of the names that a loop binds are used elsewhere in its scope; what other loops bind anew for themselves is not."""
    others = [n for n in m.findall(scope, m.For() | m.CompFor()) if n is not loop]
    found = set()
    for name in names:
        holders = [_whole(scope, n) for n in others if name in names_in(n.target)]  # type: ignore[attr-defined]
        if len(occurrences(scope, name)) > sum(len(occurrences(one, name)) for one in (loop, *holders)):
            found.add(name)
    return found


def _whole(scope: cst.CSTNode, holder: cst.CSTNode) -> cst.CSTNode:
    """The comprehension that a `for` belongs to, or the loop itself."""
    if isinstance(holder, cst.For):
        return holder
    kinds = m.ListComp() | m.SetComp() | m.GeneratorExp() | m.DictComp()
    return next(c for c in m.findall(scope, kinds) if any(n is holder for n in m.findall(c, m.CompFor())))


class _Occurrences(cst.CSTVisitor):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.found: list[cst.Name] = []
        self._name = name

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        if node.value == self._name:
            self.found.append(node)


Change = Callable[[cst.CSTNode], cst.CSTNode | Sequence[cst.CSTNode]]
"""Told a node whose parts are changed already, gives what comes in its stead: a node, or statements."""


def with_changes(node: Node, changes: Mapping[cst.CSTNode, Change]) -> Node:
    """The tree with nodes (told by identity) changed, the inner before the outer; comments above a statement stay there."""
    return node.visit(_Changer(changes))  # type: ignore[return-value]


class _Changer(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, Change]) -> None:
        super().__init__()
        self._changes = {id(old): change for old, change in changes.items()}
        self._kept = list(changes)  # so that identities stay taken

    def on_leave(
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> Any:  # what a visitor may give is more than its stubs say of one node
        change = self._changes.get(id(original_node))
        if change is None:
            return super().on_leave(original_node, updated_node)
        new = change(updated_node)
        if isinstance(new, cst.CSTNode):
            return new
        return cst.FlattenSentinel(_with_lines_of(updated_node, new)) if new else cst.RemoveFromParent()


def _with_lines_of(old: cst.CSTNode, new: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """Statements that come in the stead of one: the comments and empty lines above it stand above the first of them."""
    lines = getattr(old, "leading_lines", ())
    found = [n.with_changes(leading_lines=()) if hasattr(n, "leading_lines") and n is old else n for n in new]
    if found and hasattr(found[0], "leading_lines"):
        found[0] = found[0].with_changes(leading_lines=lines)
    return found
