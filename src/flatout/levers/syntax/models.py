"""Models in a text: the statements that make them, by the class that is made, and what is put right behind one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.source import code_of, names_in, parsed, renamed, statements, with_statements

_CHAINED: Final = (
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
_SIGNS: Final = frozenset(
    [
        "parameters",
        "named_parameters",
        "train",
        "eval",
        "state_dict",
        "load_state_dict",
        "zero_grad",
        "to",
        "cuda",
        "modules",
    ]
)
"""Methods that tell a module (`to` and `cuda` with another of them, or a call)."""
_FORWARD: Final = m.FunctionDef(name=m.Name("forward"))


class Made(NamedTuple):
    """`name` (maybe dotted) is assigned what the call `value` makes: an object of class `kind` ('' where that is not seen).

    `statement` does so, in `block`, inside `function` (None: at the top).
    `is_part`: by a method of a class that has a `forward`, or by a function that returns it: it becomes part of something.
    """

    name: str
    kind: str
    value: cst.Call
    statement: cst.SimpleStatementLine
    block: Sequence[cst.BaseStatement]
    function: cst.FunctionDef | None
    is_part: bool


def made_in(module: cst.Module) -> list[Made]:
    """Every assignment of a newly made object to one name."""
    return [one for one in _assignments(module) if one.kind]


def behind_model(text: str, template: str) -> str:
    """The text with statements behind the making of its model, which the template calls `model`.

    Raises EditError when it is not certain which that is.
    """
    module = parsed(text)
    made = _model(module)
    last = _last_move(made)
    new = [renamed(s, {"model": made.name}) for s in statements(template)]
    return with_statements(module, {last: [last, *new]}).code


def _assignments(module: cst.Module) -> list[Made]:
    """Every assignment to one name of what a call makes."""
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
        self._blocks: list[Sequence[cst.BaseStatement]] = []

    def visit_Module(self, node: cst.Module) -> None:
        self._blocks.append(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._blocks.append(node.body)

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock) -> None:
        self._blocks.pop()

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._classes.append(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._classes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._functions.pop()

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        assigned = _assigned(node)
        if assigned is None:
            return
        target, value = assigned
        function = self._functions[-1] if self._functions else None
        is_part = function is not None and function.name.value in self._builders
        if self._classes:
            is_part |= m.matches(
                self._classes[-1].body, m.IndentedBlock(body=[m.ZeroOrMore(), _FORWARD, m.ZeroOrMore()])
            )
        kind = _made(value, self._builders)
        self.found.append(Made(code_of(target), kind, value, node, self._blocks[-1], function, is_part))


def _assigned(line: cst.SimpleStatementLine) -> tuple[cst.BaseExpression, cst.Call] | None:
    """The one name, maybe dotted, that a line assigns a call to."""
    only = line.body[0] if len(line.body) == 1 else None
    if isinstance(only, cst.Assign) and len(only.targets) == 1:
        target = only.targets[0].target
    elif isinstance(only, cst.AnnAssign):
        target = only.target
    else:
        return None
    is_named = isinstance(target, (cst.Name, cst.Attribute))
    return (target, only.value) if is_named and isinstance(only.value, cst.Call) else None


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


def module_classes(module: cst.Module) -> set[str]:
    """Classes at the top of the file that derive from a Module, as far as their bases' names tell."""
    bases = {
        s.name.value: {code_of(b.value).rpartition(".")[2] for b in s.bases}
        for s in module.body
        if isinstance(s, cst.ClassDef)
    }
    found: set[str] = set()
    while new := {
        name for name, of in bases.items() if name not in found and any(_is_module_name(b, bases, found) for b in of)
    }:
        found |= new
    return found


def _is_module_name(name: str, bases: Mapping[str, object], found: set[str]) -> bool:
    """Whether a base class is a module: one of the file that is, or one from elsewhere that is not `object` or the like."""
    return name in found or (name not in bases and name[:1].isupper())


def names_of_models(module: cst.Module) -> set[str]:
    """Names that are assigned what a class of modules at the top of the file makes, alone or in a tuple."""
    known, builders = module_classes(module), _builders(module)
    found = set()
    for node in m.findall(module, m.Assign()):
        assert isinstance(node, cst.Assign)
        for target, value in _pairs(node):
            if _made(value, builders) in known and isinstance(target, (cst.Name, cst.Attribute)):
                found.add(code_of(target))
    return found


def _pairs(node: cst.Assign) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Target and value, one by one where tuples of the same length are assigned."""
    target, value = node.targets[-1].target, node.value
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple) and len(target.elements) == len(value.elements):
        yield from ((t.value, v.value) for t, v in zip(target.elements, value.elements, strict=True))
    else:
        yield target, value


def plain_classes(module: cst.Module) -> set[str]:
    """Classes at the top of the file that are no modules."""
    return {s.name.value for s in module.body if isinstance(s, cst.ClassDef)} - module_classes(module)


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


def _model(module: cst.Module) -> Made:
    """The one model of a file, as it is made or moved last.

    Raises EditError when there is none, or more than one.
    """
    made: dict[str, list[Made]] = {}
    for one in _assignments(module):
        made.setdefault(one.name, []).append(one)
    called, methods = _uses(module)
    names = [n for n in made if n in called and methods.get(n, set()) & _SIGNS]
    if len(names) != 1:
        found = f"{', '.join(names)} are" if names else "nothing that is called and has parameters is"
        raise EditError(f"{found} made in the file; which one is the model?" if names else f"{found} made in the file")
    [name] = names
    first, *others = made[name]
    if any(not _is_move(name, other.value) for other in others):
        raise EditError(f"'{name}' is assigned to more than once")
    if any(other.block is not first.block for other in others):
        raise EditError(f"'{name}' is moved to its device somewhere else")
    return made[name][-1]


def _uses(module: cst.Module) -> tuple[set[str], dict[str, set[str]]]:
    """Bare names that are called; and the methods that are called of each."""
    called: set[str] = set()
    methods: dict[str, set[str]] = {}
    for call in m.findall(module, m.Call()):
        assert isinstance(call, cst.Call)
        if isinstance(call.func, cst.Name):
            called.add(call.func.value)
        elif isinstance(call.func, cst.Attribute) and isinstance(call.func.value, cst.Name):
            methods.setdefault(call.func.value.value, set()).add(call.func.attr.value)
    return called, methods


def _is_move(name: str, call: cst.BaseExpression) -> bool:
    """Whether it is `name.to(...)`, or another method that returns the model itself."""
    while isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value in _CHAINED:
        call = call.func.value
        if isinstance(call, cst.Name):
            return call.value == name
    return False


def _last_move(made: Made) -> cst.SimpleStatementLine:
    """The last of the statements right behind that move the model in place, `name.to(device)`; else the one that made it."""
    last = made.statement
    at = next(i for i, s in enumerate(made.block) if s is last)
    for statement in made.block[at + 1 :]:
        only = (
            statement.body[0] if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1 else None
        )
        if not isinstance(only, cst.Expr) or not _is_move(made.name, only.value):
            break
        assert isinstance(statement, cst.SimpleStatementLine)
        last = statement
    return last
