"""The surroundings of a statement in a syntax tree: its blocks, what they change in place, other reads of a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import libcst as cst
from libcst import matchers as m

from flatout.core.runtime.torch_functions import is_in_place
from flatout.tune.rewrite.source import assigned_in, bare_names, names_in, nodes_of, with_changes

Parents: TypeAlias = "Mapping[cst.CSTNode, cst.CSTNode]"
Loop: TypeAlias = "cst.For | cst.While"


class Level(NamedTuple):
    """A block around a statement: the body of `owner`, with the statement at index `at`."""

    owner: cst.CSTNode
    block: Sequence[cst.BaseStatement]
    at: int

    @property
    def statement(self) -> cst.BaseStatement:
        """The statement of this block that is, or holds, the one asked for."""
        return self.block[self.at]


def parents_of(module: cst.Module) -> Parents:
    """The node above each node of the tree."""
    from libcst.metadata import MetadataWrapper, ParentNodeProvider

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


def enclosing_loops(parents: Parents, node: cst.CSTNode) -> list[Loop]:
    """The loops around a node in its own function (or the file), innermost first."""
    return [level.owner for level in levels(parents, node) if isinstance(level.owner, (cst.For, cst.While))]


def only_small(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """The one small statement of a line; None where there are more."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def assignment(statement: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Target and value of a plain assignment to one target; None for anything else."""
    small = only_small(statement)
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        return small.targets[0].target, small.value
    return None


def assigns_names(statement: cst.BaseStatement) -> bool:
    """Whether a statement is an assignment to names, or a context (autocast) around such alone."""
    if isinstance(statement, cst.With):
        return all(assigns_names(one) for one in statement.body.body if isinstance(one, cst.BaseStatement))
    small = only_small(statement)
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return False
    return m.matches(small.targets[0].target, m.Name() | m.Tuple(elements=[m.AtLeastN(m.Element(m.Name()), n=1)]))


def calls_backward(statement: cst.CSTNode) -> bool:
    """Whether a line is a call of `backward()` and nothing else."""
    small = only_small(statement)
    called = m.Call(func=m.Attribute(attr=m.Name("backward")))
    return small is not None and m.matches(small, m.Expr(value=called))


def is_skip(statement: cst.If) -> bool:
    """Whether the statement is `if ...: continue` and nothing else."""
    body = statement.body.body
    skips = len(body) == 1 and m.matches(body[0], m.SimpleStatementLine(body=[m.Continue()]) | m.Continue())
    return skips and statement.orelse is None


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
        found |= {root_name(a.target) for a in nodes_of(cst.AugAssign, one)}
        for func in (c.func for c in nodes_of(cst.Call, one) if isinstance(c.func, cst.Attribute)):
            if is_in_place(func.attr.value) and func.attr.value != "requires_grad_":
                found.add(root_name(func))
        for out in m.findall(one, m.Arg(keyword=m.Name("out"))):
            found |= names_in(out)
    return found - {""}


def closed_over(module: cst.Module, function: cst.FunctionDef | None) -> set[str]:
    """Names that inner functions of a function (or any function, for the file itself) read from around themselves."""
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
    """The node in which a name of this function, or of the file, is known."""
    return function.body if function is not None else module


def occurrences(node: cst.CSTNode | Iterable[cst.CSTNode], name: str) -> list[cst.Name]:
    """Places where a bare name is used (no attributes, no keywords of calls)."""
    return [found for found in bare_names(node) if found.value == name]


def rebinds(statement: cst.CSTNode, name: str) -> bool:
    """Whether a statement gives the name a new value, whatever it had."""
    if isinstance(statement, cst.For):
        return name in names_in(statement.target) and not occurrences(statement.iter, name)
    if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Assign):
        first = statement.body[0]
        is_plain = all(isinstance(t.target, (cst.Name, cst.Tuple)) for t in first.targets)
        return is_plain and name in assigned_in(first) and not occurrences(first.value, name)
    return False


def read_elsewhere(module: cst.Module, function: cst.FunctionDef | None, statement: cst.CSTNode) -> set[str]:
    """Names that are read in the rest of the scope around a statement, or by inner functions from around themselves."""
    scope = scope_of(module, function)
    gone = [statement, *m.findall(scope, m.FunctionDef())]
    rest = with_changes(scope, dict.fromkeys(gone, lambda _: []))
    targets = [one.target for one in m.findall(rest, m.AssignTarget() | m.For() | m.CompFor())]  # type: ignore[attr-defined]
    stored = {id(name) for target in targets for name in _bound_in(target)}
    return {name.value for name in bare_names(rest) if id(name) not in stored} | closed_over(module, function)


def _bound_in(target: cst.CSTNode) -> Iterator[cst.Name]:
    """The names to which an assignment to this target gives a value."""
    if isinstance(target, cst.Name):
        yield target
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _bound_in(element.value)


def used_outside(scope: cst.CSTNode, loop: cst.For, names: Iterable[str]) -> set[str]:
    """Names, of those that a loop binds, that are used elsewhere in its scope; what other loops bind for themselves is
    left out.
    """
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
