"""Models in a text: the statements that make them, by the class that is made, through functions of the file that build them."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.levers.syntax.source import code_of, names_in

_CHAINED = (
    "to",
    "cuda",
    "cpu",
    "eval",
    "train",
    "float",
    "double",
    "half",
    "bfloat16",
    "requires_grad_",
    "apply",
    "share_memory",
)
"""Methods of nn.Module that return the module itself (documentation of torch 2.13)."""
_FORWARD = m.FunctionDef(name=m.Name("forward"))


class Made(NamedTuple):
    """`name` (maybe dotted) is assigned a new object of class `kind` by `statement`, inside `function` (None: at the top).

    `is_part`: by a method of a class that has a `forward`, or by a function that returns it: it becomes part of something.
    """

    name: str
    kind: str
    statement: cst.SimpleStatementLine
    assign: cst.Assign
    function: cst.FunctionDef | None
    is_part: bool


def made_in(module: cst.Module) -> list[Made]:
    """Every assignment of a newly made object to one name."""
    finder = _Finder(module)
    module.visit(finder)
    return finder.found


class _Finder(cst.CSTVisitor):
    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self.found: list[Made] = []
        self._builders = _builders(module)
        self._functions: list[cst.FunctionDef] = []
        self._classes: list[cst.ClassDef] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._classes.append(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._classes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._functions.pop()

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        if len(node.body) != 1 or not isinstance(assign := node.body[0], cst.Assign) or len(assign.targets) != 1:
            return
        target, made = assign.targets[0].target, _made(assign.value, self._builders)
        if made and isinstance(target, (cst.Name, cst.Attribute)):
            function = self._functions[-1] if self._functions else None
            is_part = function is not None and function.name.value in self._builders
            if self._classes:
                is_part |= m.matches(
                    self._classes[-1].body, m.IndentedBlock(body=[m.ZeroOrMore(), _FORWARD, m.ZeroOrMore()])
                )
            self.found.append(Made(code_of(target), made, node, assign, function, is_part))


def _made(value: cst.BaseExpression, builders: dict[str, str]) -> str:
    """The class of what an expression makes, '' if unknown: `Net(8).to(device)` makes a Net."""
    while isinstance(value, cst.Call):
        called = value.func
        if isinstance(called, cst.Attribute) and called.attr.value in _CHAINED and isinstance(called.value, cst.Call):
            value = called.value
            continue
        last = called.attr.value if isinstance(called, cst.Attribute) else code_of(called)
        return builders.get(last, last) if last.isidentifier() else ""
    return ""


def _builders(module: cst.Module) -> dict[str, str]:
    """Functions of the file that return a new object, and its class."""
    found: dict[str, str] = {}
    for statement in module.body:
        if not isinstance(statement, cst.FunctionDef):
            continue
        kinds = {_returned(statement, node) for node in m.findall(statement.body, m.Return())}
        if len(kinds) == 1 and (kind := kinds.pop()):
            found[statement.name.value] = kind
    return found


def _returned(function: cst.FunctionDef, node: cst.CSTNode) -> str:
    assert isinstance(node, cst.Return)
    value = node.value
    if isinstance(value, cst.Name):
        assigned = [a.value for a in m.findall(function, m.Assign(targets=[m.AssignTarget(m.Name(value.value))]))]  # type: ignore[attr-defined]
        value = assigned[0] if len(assigned) == 1 else None
    return _made(value, {}) if value is not None else ""


def definitions_with(module: cst.Module, names: set[str]) -> set[str]:
    """Classes and functions at the top of the file that use one of these names, or one another that does."""
    uses = {}
    for s in module.body:
        if isinstance(s, (cst.ClassDef, cst.FunctionDef)):
            attributes = {a.attr.value for a in m.findall(s, m.Attribute())}  # type: ignore[attr-defined]
            uses[s.name.value] = names_in(s.body) | attributes
    found: set[str] = set()
    while new := {name for name, used in uses.items() if name not in found and used & (names | found)}:
        found |= new
    return found
