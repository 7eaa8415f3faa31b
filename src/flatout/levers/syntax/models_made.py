"""Where a script makes its model: the one name that it assigns a module to and calls; statements put right behind that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.source import parsed, renamed, statements, with_statements

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
_MOVES: Final = frozenset(["to", "cuda", "cpu", "float", "bfloat16", "half", "double", "train", "eval"])
"""Methods that return the module itself."""


class Made(NamedTuple):
    """A model's name and the last statement that makes or moves it."""

    name: str
    last: cst.SimpleStatementLine


def model_made(module: cst.Module) -> Made:
    """The one model of a file.

    Raises EditError when there is none, or more than one.
    """
    finder = _Finder()
    module.visit(finder)
    names = [n for n in finder.made if n in finder.called and finder.methods.get(n, set()) & _SIGNS]
    if len(names) != 1:
        found = f"{', '.join(names)} are" if names else "nothing that is called and has parameters is"
        raise EditError(f"{found} made in the file; which one is the model?" if names else f"{found} made in the file")
    [name] = names
    first, *others = finder.made[name]
    if any(not _moves(name, other) for other in others):
        raise EditError(f"'{name}' is assigned to more than once")
    if others and len({id(b) for b, _ in finder.made[name]}) > 1:
        raise EditError(f"'{name}' is moved to its device somewhere else")
    block, _ = first
    return Made(name, _last_move(name, block, finder.made[name][-1][1]))


def behind_model(text: str, template: str) -> str:
    """The text with statements behind the making of its model, which the template calls `model`.

    Raises EditError when it is not certain which that is.
    """
    module = parsed(text)
    made = model_made(module)
    new = [renamed(s, {"model": made.name}) for s in statements(template)]
    return with_statements(module, {made.last: [made.last, *new]}).code


Assigned = tuple[Sequence[cst.BaseStatement], cst.SimpleStatementLine]


class _Finder(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[Assigned]] = {}
        self.called: set[str] = set()
        self.methods: dict[str, set[str]] = {}
        self._blocks: list[Sequence[cst.BaseStatement]] = []

    def visit_Module(self, node: cst.Module) -> None:
        self._blocks.append(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._blocks.append(node.body)

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock) -> None:
        self._blocks.pop()

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        made = m.Assign(targets=[m.AssignTarget(target=m.Name())], value=m.Call()) | m.AnnAssign(
            target=m.Name(), value=m.Call()
        )
        if len(node.body) == 1 and m.matches(node.body[0], made):
            only = node.body[0]
            target = only.targets[0].target if isinstance(only, cst.Assign) else only.target  # type: ignore[attr-defined]
            assert isinstance(target, cst.Name)
            self.made.setdefault(target.value, []).append((self._blocks[-1], node))

    def visit_Call(self, node: cst.Call) -> None:
        if isinstance(node.func, cst.Name):
            self.called.add(node.func.value)
        elif isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Name):
            self.methods.setdefault(node.func.value.value, set()).add(node.func.attr.value)


def _moves(name: str, assigned: Assigned) -> bool:
    """Whether this is `name = name.to(...)`."""
    only = assigned[1].body[0]
    return isinstance(only, (cst.Assign, cst.AnnAssign)) and only.value is not None and _is_move(name, only.value)


def _is_move(name: str, call: cst.BaseExpression) -> bool:
    while isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value in _MOVES:
        call = call.func.value
        if isinstance(call, cst.Name):
            return call.value == name
    return False


def _last_move(name: str, block: Sequence[cst.BaseStatement], last: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """The last of the statements right behind that move the model in place, `name.to(device)`; else the one that made it."""
    at = next(i for i, s in enumerate(block) if s is last)
    for statement in block[at + 1 :]:
        is_move = (
            isinstance(statement, cst.SimpleStatementLine)
            and len(statement.body) == 1
            and isinstance(only := statement.body[0], cst.Expr)
            and _is_move(name, only.value)
        )
        if not is_move:
            break
        assert isinstance(statement, cst.SimpleStatementLine)
        last = statement
    return last
