"""Checks that a piece of Python is about numbers and arrays alone, so that Numba can compile it."""

from __future__ import annotations

from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import Node, assigned_in, code_of, names_in, nodes_of, with_changes, word_set

_BUILTINS: Final = word_set("range len int float abs min max round bool enumerate zip sum divmod reversed")
_NUMPY: Final = word_set(
    "abs absolute all any arange arccos arcsin arctan arctan2 argmax argmin argsort cbrt ceil clip copy cos cosh "
    "cross cumsum diff dot empty empty_like exp exp2 expm1 fabs float32 float64 floor fmod full full_like hypot "
    "int32 int64 isfinite isnan linspace log log10 log1p log2 max maximum mean median min minimum mod ones "
    "ones_like power prod radians rint round searchsorted sign sin sinh sort sqrt square std sum tan tanh trunc "
    "uint8 var where zeros zeros_like"
)
"""Functions that Numba compiles (its documentation, 'Supported NumPy features', 0.60 and later)."""
_METHODS: Final = word_set("all any argmax argmin copy cumsum dot fill max mean min prod ravel std sum var")
_ATTRIBUTES: Final = word_set("shape size ndim T")
_UNKNOWN: Final = word_set(
    "Try TryStar With FunctionDef ClassDef Raise Import ImportFrom Global Nonlocal Del Yield Await Lambda Dict DictComp Set "
    "SetComp GeneratorExp FormattedString ConcatenatedString StarredElement Match"
)
"""Kinds of nodes that are no matter of numbers, or that Numba does not compile."""


def has_loop(node: cst.CSTNode) -> bool:
    """Whether a statement is, or contains, a loop."""
    return bool(m.findall(node, m.For() | m.While()))


def function_named(module: cst.Module, name: str) -> cst.FunctionDef | None:
    """The function at the top of the file; None when there is none, or more than one."""
    found = [s for s in module.body if isinstance(s, cst.FunctionDef) and s.name.value == name]
    return found[0] if len(found) == 1 else None


def numeric_constants(module: cst.Module) -> set[str]:
    """Names at the top of the file to which one number is assigned, once."""
    written: dict[str, list[cst.BaseExpression | None]] = {}
    for node in m.findall(module, m.Assign() | m.AugAssign() | m.AnnAssign() | m.For()):
        value = node.value if isinstance(node, (cst.Assign, cst.AnnAssign)) else None
        for name in assigned_in(node) if not isinstance(node, cst.For) else ():
            written.setdefault(name, []).append(value)
    top = {n for s in module.body if isinstance(s, cst.SimpleStatementLine) for n in assigned_in(s)}
    constants: set[str] = set()
    for name in sorted(top):
        values = written.get(name, [])
        if len(values) == 1 and values[0] is not None and _is_constant(values[0], constants):
            constants.add(name)
    return constants


def without_reversed(node: Node) -> Node:
    """The node with `reversed(range(n))`, which Numba does not know, written as a range that goes down."""
    calls = m.findall(node, m.Call(func=m.Name("reversed")))
    return with_changes(node, dict.fromkeys(calls, _downward))


def _downward(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.Call)
    inner = node.args[0].value if len(node.args) == 1 else None
    if not isinstance(inner, cst.Call) or code_of(inner.func) != "range" or not 1 <= len(inner.args) <= 2:
        raise EditError(f"'{code_of(node)}' is not known to compile")
    start = inner.args[0].value if len(inner.args) == 2 else cst.Integer("0")
    return cst.parse_expression(f"range({_less_one(inner.args[-1].value)}, {_less_one(start)}, -1)")


def _less_one(node: cst.BaseExpression) -> str:
    """One less than an expression, as a person would write it."""
    if isinstance(node, cst.Integer):
        return str(int(node.value) - 1)
    if not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.BinaryOperation)):
        raise EditError(f"'{code_of(node)}' is not known to be a number")
    if isinstance(node, cst.BinaryOperation) and isinstance(node.right, cst.Integer) and not node.lpar:
        if isinstance(node.operator, cst.Subtract):
            return f"{code_of(node.left)} - {int(node.right.value) + 1}"
        if isinstance(node.operator, cst.Add) and node.right.value == "1":
            return code_of(node.left)
    return f"{code_of(node)} - 1"


def _is_constant(node: cst.BaseExpression, constants: set[str]) -> bool:
    if isinstance(node, (cst.Integer, cst.Float)):
        return True
    if isinstance(node, cst.Name):
        return node.value in constants or node.value in ("True", "False")
    if isinstance(node, cst.UnaryOperation):
        return _is_constant(node.expression, constants)
    if isinstance(node, cst.BinaryOperation):
        return _is_constant(node.left, constants) and _is_constant(node.right, constants)
    if isinstance(node, cst.Tuple):
        return all(_is_constant(e.value, constants) for e in node.elements)
    return isinstance(node, cst.Attribute) and code_of(node) in ("math.pi", "math.e", "np.pi")


def check_numbers(module: cst.Module, node: cst.CSTNode, *, known: set[str]) -> set[str]:
    """Functions of the file that a node calls; `known` are names of its inputs and results.

    Raises EditError when something in it is not known to compile.
    """
    for unknown in m.findall(node, m.MatchIfTrue(lambda found: type(found).__name__ in _UNKNOWN)):
        raise EditError(f"'{code_of(unknown).splitlines()[0]}' is no matter of numbers")
    for text in nodes_of(cst.SimpleString, node):
        if not _is_docstring(node, text):
            raise EditError(f"{code_of(text).splitlines()[0]} is a text")
    callees = [c.func for c in nodes_of(cst.Call, node)]
    used = {c.value for c in callees if isinstance(c, cst.Name) and function_named(module, c.value) is not None}
    for attribute in nodes_of(cst.Attribute, node):
        _check_attribute(module, attribute, is_called=any(attribute is c for c in callees))
    constants = numeric_constants(module)
    for comprehension in nodes_of(cst.CompFor, node):
        raise EditError(f"'{code_of(comprehension)}' makes a list")
    for name in names_in(node):
        is_known = name in known or name in constants or name in used or name in _BUILTINS or name in _LITERALS
        if not is_known and call_name(module, cst.Name(name)) not in ("numpy", "math"):
            raise EditError(f"'{name}' is not known to be a number or an array")
    return used


_LITERALS: Final = word_set("True False None _")


def _is_docstring(node: cst.CSTNode, text: cst.CSTNode) -> bool:
    """Whether a text is a statement of its own."""
    return any(expr.value is text for expr in nodes_of(cst.Expr, node))


def _check_attribute(module: cst.Module, node: cst.Attribute, *, is_called: bool) -> None:
    full, code = call_name(module, node), code_of(node)
    if full.startswith("math."):
        return
    if full.startswith("numpy."):
        if full.removeprefix("numpy.") in _NUMPY or (not is_called and full in ("numpy.pi", "numpy.e", "numpy.inf")):
            return
        raise EditError(f"'{code}' is not known to compile")
    if full:
        raise EditError(f"'{code}' is not known to compile")
    if node.attr.value not in (_METHODS if is_called else _ATTRIBUTES):
        raise EditError(f"'{code}' is not known of an array")
