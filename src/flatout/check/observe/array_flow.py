"""The way of values through a function's source: from `tensor.numpy()` through NumPy back into a tensor.

What left is followed through assignments, arithmetic, NumPy's and the file's own functions. It ends in any other call: what an
environment, a tokenizer or a metric of a library makes of an array is not the same value that comes back.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

_PACKAGES: Final = ("numpy", "scipy")
"""Packages whose functions are written anew with torch operators."""
_BUILTINS: Final = ("list", "tuple", "zip", "enumerate", "reversed", "sorted", "sum", "map", "abs", "max", "min")
_ADDING: Final = ("append", "extend", "insert")
_SIZES: Final = ("shape", "ndim", "size", "dtype")
_CONSTRUCTORS: Final = (
    "tensor",
    "as_tensor",
    "from_numpy",
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "LongTensor",
    "IntTensor",
)
_ROUNDS: Final = 2
"""A loop's later lines feed its earlier ones in the next iteration."""

Body = list[ast.stmt]


class ArrayFlow(NamedTuple):
    """Where values leave and come back in one function, and the first and last lines of what works on them between."""

    away: tuple[int, ...]
    back: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def array_flows(text: str, away: Iterable[int]) -> list[ArrayFlow]:
    """The flows of a file's functions that begin at calls of `.numpy()` on these lines and come back to torch."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a file that changed under the running script, or is none
        return []
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    helpers = {f.name: (f.lineno, f.end_lineno or f.lineno) for f in functions}
    aliases = set(_aliases(tree))
    bodies: dict[int, Body] = {0: tree.body} | {f.lineno: f.body for f in functions}
    found: dict[int, list[ArrayFlow]] = defaultdict(list)
    for line in sorted(away):  # each on its own: a value that is logged takes no time of one that comes back
        first = max((f.lineno for f in functions if f.lineno <= line <= (f.end_lineno or 0)), default=0)
        flow = _Function(helpers, aliases, line).flow(bodies[first])
        if flow.back:
            found[first].append(flow)
    return [_joined(flows) for flows in found.values()]


def _joined(flows: list[ArrayFlow]) -> ArrayFlow:
    away = {line for flow in flows for line in flow.away}
    back = {line for flow in flows for line in flow.back}
    spans = {span for flow in flows for span in flow.spans}
    return ArrayFlow(tuple(sorted(away)), tuple(sorted(back)), tuple(sorted(spans)))


def _aliases(tree: ast.Module) -> Iterator[str]:
    """The names under which the file knows NumPy, its modules and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.asname or a.name.partition(".")[0] for a in node.names if a.name.partition(".")[0] in _PACKAGES
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _PACKAGES:
            yield from (a.asname or a.name for a in node.names)


class _Function:
    """Follows arrays through one function, statement by statement."""

    def __init__(self, helpers: dict[str, tuple[int, int]], aliases: set[str], away: int) -> None:
        self._helpers = helpers
        self._aliases = aliases
        self._away = away
        self._arrays: set[str] = set()
        """Names that hold arrays which left torch, dotted ones too."""
        self._back: set[int] = set()
        self._spans: set[tuple[int, int]] = set()

    def flow(self, body: Body) -> ArrayFlow:
        for _ in range(_ROUNDS):
            for statement in _statements(body):
                self._follow(statement)
        return ArrayFlow((self._away,), tuple(sorted(self._back)), tuple(sorted(self._spans)))

    def _follow(self, statement: ast.stmt) -> None:
        """Note what a simple statement, or the head of a compound one, does with arrays."""
        parts = _expressions(statement)
        inside = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.expr)]
        if any(self._is_array(node) for node in inside):
            last = max((part.end_lineno or part.lineno for part in parts), default=statement.lineno)
            self._spans.add((statement.lineno, last))
        for node in inside:
            if isinstance(node, ast.Call) and _is_constructor(node) and any(map(self._is_array, node.args)):
                self._back.add(node.lineno)
        match statement:
            case ast.Assign(targets=targets, value=value):
                self._bind(targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind([target], value)
            case ast.AugAssign(target=target, value=value) if self._is_array(value):
                self._arrays.update(_names(target))
            case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                self._bind([target], values)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=name), args=args)) if name in _ADDING:
                if any(map(self._is_array, args)):
                    self._arrays.update(_names(owner))

    def _bind(self, targets: list[ast.expr], value: ast.expr) -> None:
        is_array = self._is_array(value)
        for target in targets:
            if is_array:
                self._arrays.update(_names(target))
            elif not isinstance(target, ast.Subscript):  # an element that is none leaves the others
                self._arrays.difference_update(_names(target))

    def _is_array(self, node: ast.expr) -> bool:
        match node:
            case ast.Call():
                return self._is_from_arrays(node)
            case ast.Name(id=name):
                return name in self._arrays
            case ast.Attribute(value=owner, attr=name):
                return name not in _SIZES and (ast.unparse(node) in self._arrays or self._is_array(owner))
            case ast.Subscript(value=owner):
                return self._is_array(owner)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._is_gathered(node)
            case ast.Lambda() | ast.Constant() | ast.JoinedStr():
                return False
        return any(self._is_array(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def _is_from_arrays(self, call: ast.Call) -> bool:
        if _is_constructor(call):
            return False
        func = call.func
        if isinstance(func, ast.Attribute) and func.attr == "numpy":
            return call.lineno <= self._away <= (call.end_lineno or call.lineno)
        has_array = any(map(self._is_array, [*call.args, *(keyword.value for keyword in call.keywords)]))
        name = ast.unparse(func)
        helper = name.removeprefix("self.")
        if has_array and helper in self._helpers:
            self._spans.add(self._helpers[helper])
            return True
        if has_array and (name in _BUILTINS or name.partition(".")[0] in self._aliases):
            return True
        return isinstance(func, ast.Attribute) and self._is_array(func.value)

    def _is_gathered(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> bool:
        """Whether a comprehension's elements are arrays, with its own names bound to what it goes over."""
        outside = set(self._arrays)
        for generator in node.generators:
            self._bind([generator.target], generator.iter)
        is_array = self._is_array(node.elt)
        self._arrays = outside
        return is_array


def _statements(body: Body) -> Iterator[ast.stmt]:
    """The statements in the order of the text, without those of functions and classes defined inside."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """A statement's own expressions: of a compound one those in its head."""
    found = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
    return found + [item.context_expr for item in getattr(statement, "items", [])]


def _names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _names(part)
        case ast.Starred(value=inner) | ast.Subscript(value=inner):
            yield from _names(inner)
        case ast.Name() | ast.Attribute():
            yield ast.unparse(target)


def _is_constructor(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] in _CONSTRUCTORS
