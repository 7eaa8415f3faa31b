"""Arithmetic on one parameter after the other becomes one call for the lists of all of them.

What        A loop over tensors (an optimizer's update, an average of weights, decay, clipping by hand) keeps what chooses and
            looks up tensors, and gathers them; its arithmetic follows the loop as `torch._foreach_*` calls on the lists.
Guarantee   BOUNDED: the same operations on each tensor; kernels for lists may round fused steps otherwise.
Refuses     Loops whose arithmetic hands something from one tensor to the next, uses numbers that differ from tensor to tensor in
            keywords, has no function for lists, or is followed by lookups; and loops that are left early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import is_skip, used_outside
from flatout.tune.rewrite.imports import with_torch
from flatout.tune.rewrite.source import (
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    names_in,
    statements,
    with_changes,
)

_UNARY: Final = ("sqrt", "neg", "abs", "exp", "log", "reciprocal", "rsqrt", "sign", "sigmoid", "tanh", "zero")
_BINARY: Final = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max")
_TERNARY: Final = ("addcmul", "addcdiv")
_EACH: Final = ("clone", "detach")
"""Methods that have no function for lists, and cost no arithmetic."""
_SCALED: Final = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
_OPERATORS: Final = {"Add": "add", "Subtract": "sub", "Multiply": "mul", "Divide": "div", "Power": "pow"}
_NUMBERS: Final = ("abs", "bool", "float", "int", "len", "max", "min", "pow")


class _List(NamedTuple):
    """Tensors in a list, one of each round of the loop: the expression of the list, and whether it is a plain name."""

    code: str
    is_name: bool = True


_Value: TypeAlias = "_List | cst.BaseExpression"
"""A list of tensors, or a number that is the same in all rounds."""


def edit(text: str, parameters: Parameters) -> str:
    """Collect the loop's tensors, and do the arithmetic on the lists after it.

    Raises EditError where that is not certain.
    """
    place = find(text, parameters)
    loop = place.statement
    if not isinstance(loop, cst.For) or not isinstance(loop.body, cst.IndentedBlock) or loop.orelse is not None:
        raise EditError("it is no plain loop")
    if loop.asynchronous is not None or m.findall(
        loop.body, m.Break() | m.Return() | m.Yield() | m.Await() | m.Raise()
    ):
        raise EditError("the loop may be left early")
    module, torch_ = with_torch(place.module)
    if module is not place.module:
        raise EditError("torch is not imported by its name")
    selecting, moved = _split(loop)
    late = assigned_in(moved) - names_in(loop.target) - assigned_in(selecting)
    outside = used_outside(place.function or place.module, loop, late)
    if outside:
        raise EditError(f"'{sorted(outside)[0]}' is used outside the loop, too")
    lists = _Lists(place.module, torch_, names_in(loop.target) | assigned_in(selecting), late)
    after = lists.moved(moved)
    if not lists.gathered:
        raise EditError("no tensor of the loop takes part in its arithmetic")
    return with_changes(
        place.module, {loop: [*_gathering(loop, selecting, lists), *_guarded(after, selecting, lists)]}
    ).code


def _split(loop: cst.For) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]]:
    """What chooses and looks up tensors, then the arithmetic."""
    own = names_in(loop.target) | assigned_in(loop.body)
    body = list(loop.body.body)
    first = next((i for i, one in enumerate(body) if _is_arithmetic(one, own)), len(body))  # type: ignore[arg-type]
    if first == len(body):
        raise EditError("no arithmetic on tensors is in the loop")
    selecting, moved = body[:first], body[first:]
    changed = assigned_in(moved) & names_in(selecting)
    if changed - assigned_in(selecting):
        raise EditError(f"'{sorted(changed)[0]}' is handed from one round to the next")
    return selecting, moved  # type: ignore[return-value]


def _is_arithmetic(statement: cst.BaseStatement, own: set[str]) -> bool:
    """Whether a statement computes with tensors, rather than choosing or making them."""
    if isinstance(statement, cst.If):
        is_selection = bool(m.findall(statement, m.Continue())) or names_in(statement.test) & own
        return not is_selection and all(_is_arithmetic(one, own) for one in statement.body.body)  # type: ignore[arg-type]
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    small = statement.body[0]
    if isinstance(small, cst.AugAssign):
        return bool(names_in(small.target) & own)
    value = small.value if isinstance(small, (cst.Expr, cst.Assign)) else None
    return value is not None and bool(names_in(value) & own) and bool(m.findall(value, _computing()))


def _computing() -> m.BaseMatcherNode:
    known = [*_UNARY, *_BINARY, *_TERNARY, "lerp", "square", "clamp", "copy"]
    names: m.MatchIfTrue[str] = m.MatchIfTrue(lambda name: name.removesuffix("_") in known)
    called = m.Call(func=m.Attribute(attr=m.Name(value=names)))
    return called | m.BinaryOperation() | m.UnaryOperation(operator=m.Minus())


class _Lists:
    """Turns arithmetic on the loop's tensors into arithmetic on lists of them."""

    def __init__(self, module: cst.Module, torch_: str, own: set[str], late: set[str]) -> None:
        self.gathered: dict[str, str] = {}
        """Names of lists by the expressions that are gathered in them."""
        self._module = module
        self._torch = torch_
        self._own = own
        self._late = late
        self._results: dict[str, str] = {}
        self._taken: set[str] = set()
        self._out: list[cst.BaseStatement] = []

    def moved(self, block: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        """The statements of the loop on lists."""
        before, self._out = self._out, []
        for statement in block:
            if isinstance(statement, cst.If):
                self._out.append(self._branch(statement))
            elif isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
                self._small(statement.body[0])
            else:
                raise EditError(f"'{_first(statement)}' is no arithmetic on tensors")
        collected, self._out = self._out, before
        return collected

    def _branch(self, statement: cst.If) -> cst.If:
        if statement.orelse is not None or names_in(statement.test) & (self._own | self._late):
            raise EditError(f"'if {code_of(statement.test)}' may differ from tensor to tensor")
        body = self.moved(statement.body.body)  # type: ignore[arg-type]
        return cst.If(test=statement.test, body=cst.IndentedBlock(body=body))

    def _small(self, small: cst.BaseSmallStatement) -> None:
        if isinstance(small, cst.Expr):
            self._value(small.value, "values")
        elif isinstance(small, cst.AugAssign):
            name = _OPERATORS.get(type(small.operator).__name__.removesuffix("Assign"))
            target = self._value(small.target, "values")
            if name is None or not isinstance(target, _List) or not target.is_name:
                raise EditError(f"'{code_of(small.operator).strip()}' has no function for lists")
            self._in_place(target, name, [self._argument(self._value(small.value, "values"))], "values")
        elif isinstance(small, cst.Assign) and len(small.targets) == 1 and m.matches(small.targets[0].target, m.Name()):
            name = cst.ensure_type(small.targets[0].target, cst.Name).value
            value = self._value(small.value, name)
            if not isinstance(value, _List):
                raise EditError(f"'{name}' is no tensor of the loop")
            listed = self._results.get(name) or self.gathered.get(name) or self._fresh(name)
            self._results[name] = listed
            if value.code != listed:
                self._emit(f"{listed} = {value.code}")
        else:
            raise EditError(f"'{_first(small)}' is no arithmetic on tensors")

    # -- values -----------------------------------------------------------------------------------------------------------

    def _value(self, node: cst.BaseExpression, wanted: str) -> _Value:
        if isinstance(node, cst.Name) and node.value in self._results:
            return _List(self._results[node.value])
        if not names_in(node) & (self._own | self._late):
            return self._number(node)
        if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) and not m.findall(node, m.Call()):
            return self._leaf(node)
        if isinstance(node, cst.BinaryOperation):
            return self._binary(node, wanted)
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
            return self._called("neg", self._value(node.expression, wanted), [])
        if isinstance(node, cst.Call):
            return self._call(node, wanted)
        raise EditError(f"'{code_of(node)}' has no function for lists")

    def _number(self, node: cst.BaseExpression) -> cst.BaseExpression:
        for call in m.findall(node, m.Call()):
            name = code_of(cst.ensure_type(call, cst.Call).func)
            if name not in _NUMBERS and not name.startswith("math."):
                raise EditError(f"'{name}' may give another value in each round")
        return node

    def _leaf(self, node: cst.BaseExpression) -> _List:
        if names_in(node) & self._late:
            raise EditError(f"'{code_of(node)}' is read before it is computed")
        code = code_of(node)
        if code not in self.gathered:
            self.gathered[code] = self._fresh(_tail(node))
        return _List(self.gathered[code])

    def _binary(self, node: cst.BinaryOperation, wanted: str) -> _List:
        name = _OPERATORS.get(type(node.operator).__name__)
        if name is None:
            raise EditError(f"'{code_of(node.operator).strip()}' has no function for lists")
        left, right = self._value(node.left, wanted), self._value(node.right, wanted)
        if isinstance(left, _List):
            return self._called(name, left, [self._argument(right)])
        assert isinstance(right, _List)
        if name in ("add", "mul"):
            return self._called(name, right, [self._argument(left)])
        if name == "sub":
            return self._called("add", self._called("neg", right, []), [self._argument(left)])
        if name == "div":
            return self._called("mul", self._called("reciprocal", right, []), [self._argument(left)])
        raise EditError(f"'{code_of(node)}' has no function for lists")

    def _call(self, node: cst.Call, wanted: str) -> _List:
        if not isinstance(node.func, cst.Attribute):
            raise EditError(f"'{code_of(node.func)}' has no function for lists")
        name, operands = node.func.attr.value, list(node.args)
        receiver: cst.BaseExpression = node.func.value
        if code_of(receiver) == self._torch and operands and operands[0].keyword is None:
            receiver, operands = operands[0].value, operands[1:]
        value = self._value(receiver, wanted)
        if not isinstance(value, _List):
            raise EditError(f"'{code_of(node)}' is not of the loop's tensors")
        plain, is_in_place = name.removesuffix("_"), name.endswith("_")
        for part, arguments in self._parts(plain, operands):
            if part in _EACH and is_in_place:
                raise EditError(f"'{name}' has no function for lists")
            if part in _EACH:
                value = _List(f"[one.{part}() for one in {value.code}]", is_name=False)
            elif is_in_place:
                value = self._in_place(value, part, arguments, wanted)
            else:
                value = self._called(part, value, arguments)
        return value

    def _parts(self, name: str, operands: Sequence[cst.Arg]) -> Iterator[tuple[str, list[str]]]:
        """The functions for lists that do what a method does, with their arguments."""
        places = [self._value(a.value, "values") for a in operands if a.keyword is None]
        keywords = {a.keyword.value: self._value(a.value, "values") for a in operands if a.keyword is not None}
        if name == "clamp":
            bounds = dict(zip(("min", "max"), places, strict=False)) | keywords
            for bound in ("min", "max"):
                if bound in bounds:
                    yield f"clamp_{bound}", [self._argument(bounds.pop(bound))]
            keywords, places = bounds, []
        elif name in _UNARY or name in _EACH:
            yield name, []
        elif name == "square":
            yield "pow", ["2"]
        elif name == "copy" and len(places) == 1:
            yield "copy", [self._listed(places[0])]
        elif name == "lerp" and len(places) == 2:  # an end and a weight
            yield "lerp", [self._listed(places[0]), self._argument(places[1])]
        elif name in _BINARY and len(places) == 1:
            scale = keywords.pop(_SCALED.get(name, ""), None)
            if scale is not None and not isinstance(places[0], _List):
                raise EditError(f"'{name}' of a number with alpha has no function for lists")
            yield name, [self._argument(places[0]), *self._keyword("alpha", scale)]
        elif name in _TERNARY and len(places) == 2:  # two factors
            yield name, [*map(self._listed, places), *self._keyword("value", keywords.pop("value", None))]
        else:
            raise EditError(f"'{name}' has no function for lists")
        if keywords or (name in _UNARY and places):
            raise EditError(f"'{name}' takes arguments that the function for lists has not")

    def _keyword(self, keyword: str, value: _Value | None) -> list[str]:
        if value is None:
            return []
        if isinstance(value, _List):
            raise EditError(f"'{keyword}' differs from tensor to tensor")
        return [f"{keyword}={code_of(value)}"]

    def _listed(self, value: _Value) -> str:
        if not isinstance(value, _List):
            raise EditError(f"'{code_of(value)}' is not of the loop's tensors")
        return value.code

    def _argument(self, value: _Value) -> str:
        return value.code if isinstance(value, _List) else code_of(value)

    def _called(self, name: str, value: _Value, arguments: Sequence[str]) -> _List:
        function = f"{self._torch}._foreach_{name}"
        return _List(f"{function}({', '.join((self._listed(value), *arguments))})", is_name=False)

    def _in_place(self, value: _List, name: str, arguments: Sequence[str], wanted: str) -> _List:
        if not value.is_name:
            listed = self._fresh(wanted)
            self._emit(f"{listed} = {value.code}")
            value = _List(listed)
        self._emit(f"{self._torch}._foreach_{name}_({', '.join((value.code, *arguments))})")
        return value

    def _emit(self, code: str) -> None:
        self._out += statements(code + "\n")

    def unused(self, name: str) -> str:
        """A name like this that nothing in the file has, nor another list."""
        name = fresh_name(self._module, name, taken=self._taken)
        self._taken.add(name)
        return name

    def _fresh(self, name: str) -> str:
        if name in self._results:
            return self._results[name]
        listed = self.unused(_plural(name))
        if name in self._late:
            self._results[name] = listed
        return listed


def _gathering(loop: cst.For, selecting: Sequence[cst.BaseStatement], lists: _Lists) -> Iterator[cst.BaseStatement]:
    """The lists: as comprehensions where the loop only chose tensors, else gathered at the end of what is left of it."""
    condition = _selection(selecting[0]) if len(selecting) == 1 else None
    if isinstance(loop.target, cst.Name) and (not selecting or condition is not None):
        name = loop.target.value
        rows = lists.gathered.get(name) or lists.unused("tensors")
        head = expression("list({over})", over=loop.iter)
        if condition is not None:
            head = expression(f"[{name} for {name} in {{over}} if {{condition}}]", over=loop.iter, condition=condition)
        first, *_ = statements(f"{rows} = {{head}}\n", head=head)
        yield first.with_changes(leading_lines=loop.leading_lines)
        for code, listed in lists.gathered.items():
            if code != name:
                yield from statements(f"{listed} = [{code} for {name} in {rows}]\n")
        return
    names = list(lists.gathered.values())
    [collected] = statements(f"{', '.join(names)} = {', '.join('[]' for _ in names)}\n")
    yield collected.with_changes(leading_lines=loop.leading_lines)
    appended = [s for code, listed in lists.gathered.items() for s in statements(f"{listed}.append({code})\n")]
    body = loop.body.with_changes(body=[*selecting, *appended])
    yield loop.with_changes(leading_lines=(), body=body)


def _guarded(
    after: list[cst.BaseStatement], selecting: Sequence[cst.BaseStatement], lists: _Lists
) -> Iterator[cst.BaseStatement]:
    """Functions for lists refuse empty ones: under a condition where the loop may have chosen none."""
    if not any(m.findall(one, m.Continue()) for one in selecting):
        yield from after
        return
    name = next(iter(lists.gathered.values()))
    yield cst.If(test=cst.Name(name), body=cst.IndentedBlock(body=after))


def _selection(statement: cst.BaseStatement) -> cst.BaseExpression | None:
    """The condition under which `if ...: continue` goes on; None for another statement."""
    if not isinstance(statement, cst.If) or not is_skip(statement):
        return None
    test = statement.test
    if m.matches(test, m.Comparison(comparisons=[m.ComparisonTarget(operator=m.Is())])):
        compared = cst.ensure_type(test, cst.Comparison)
        return compared.with_changes(comparisons=[compared.comparisons[0].with_changes(operator=cst.IsNot())])
    return expression("not ({test})", test=test)


def _tail(node: cst.BaseExpression) -> str:
    """What a leaf is called: the last name or key of `p`, `p.grad`, `state["mean"]`."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return _tail(node.value) if node.attr.value == "data" else node.attr.value
    if isinstance(node, cst.Subscript):
        key = code_of(node.slice[0].slice).strip("\"'")
        return key if key.isidentifier() else _tail(node.value)
    return "values"


def _plural(name: str) -> str:
    if name == "p":
        return "parameters"
    return name if name.endswith("s") and name != "s" else f"{name}s"


def _first(node: cst.CSTNode) -> str:
    return code_of(node).strip().splitlines()[0]


LEVER = source_lever(
    __name__,
    edit,
    title="One call for the lists of all parameters",
    else_because="no loop walks over the parameters",
    loops=(True,),
    saved_fraction=(0.6, 1.1),
)
