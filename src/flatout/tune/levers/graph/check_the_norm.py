"""One norm of all gradients tells whether any holds NaN or infinity; the search for which one runs only when one does.

What        A loop that asks each tensor `torch.isnan(g).any()` and acts on a yes is put under `if not
            torch.isfinite(torch.nn.utils.get_total_norm(gradients)):`; `any(...)` and `all(...)` of such questions likewise.
Guarantee   EXACT: the norm is finite only if every number is; when it is not, the old search runs and does what it did.
Refuses     Loops that do something else too, or whose variables are read after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.enclosing_blocks import is_skip, used_outside
from flatout.tune.rewrite.imports import call_name, with_torch
from flatout.tune.rewrite.source import (
    SourcePlace,
    assigned_in,
    code_of,
    expression,
    find,
    fresh_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
    with_expression,
)

_SAVED: Final = (0.3, 1.0)
"""Shares of what the checks take: the norm reads every number once; each check did so too, and made a tensor of answers."""
_ASKS: Final = {"isnan": "any", "isinf": "any", "isposinf": "any", "isneginf": "any", "isfinite": "all"}
"""What is asked of each number, and how the answers are put together for a question of the whole tensor."""

_PASSING: Final = ("enumerate", "zip", "list", "tuple", "reversed", "sorted", "filter", "map")
_LISTS: Final = (
    m.List()
    | m.Tuple()
    | m.ListComp()
    | m.Dict()
    | m.Call(func=m.Name("list") | m.Name("tuple") | m.Name("sorted") | m.Name("dict"))
)


class _FiniteSearch(NamedTuple):
    """A search through tensors: the `for` parts that bring them, and the expressions that are checked."""

    loops: tuple[tuple[cst.BaseExpression, cst.BaseExpression], ...]
    checked: tuple[cst.BaseExpression, ...]
    ifs: tuple[cst.BaseExpression, ...] = ()
    bound: frozenset[str] = frozenset()
    """Names that the loop binds also where it finds nothing."""


def edit(text: str, parameters: Parameters) -> str:
    """Put the search under one check of the norm of all tensors.

    Raises EditError where the loop does something when nothing is found, or is no such search.
    """
    place = find(text, parameters)
    module, torch_ = with_torch(place.module)
    if module is not place.module:
        raise EditError("torch is not imported by its name")
    if isinstance(place.statement, cst.For):
        return _around_loop(place, place.statement, torch_)
    return _before_question(place, torch_)


def _around_loop(place: SourcePlace, loop: cst.For, torch_: str) -> str:
    search = _search_of(place.module, loop)
    bound = set(search.bound)
    _see_twice(place, loop.iter)
    scope = place.function or place.module
    outside = used_outside(scope, loop, bound)
    if outside:
        raise EditError(f"'{sorted(outside)[0]}' is used outside the loop, too")
    name = fresh_name(place.module, "total_norm")
    new = statements(f"{name} = {{norm}}\nif not {torch_}.isfinite({name}):\n    pass\n", norm=_norm(search, torch_))
    new[1] = new[1].with_changes(body=cst.IndentedBlock(body=[loop.with_changes(leading_lines=())]))
    return with_changes(place.module, {loop: new}).code


def _see_twice(place: SourcePlace, over: cst.BaseExpression) -> None:
    """Check that what is searched can be iterated twice: a name may be that of a generator."""
    if isinstance(over, cst.Call) and isinstance(over.func, cst.Name) and over.func.value in _PASSING:
        for arg in over.args:
            _see_twice(place, arg.value)
    elif isinstance(over, cst.Name):
        scope = place.function or place.module
        values = [a.value for a in nodes_of(cst.Assign, scope) if over.value in assigned_in(a)]
        if not values or not all(m.matches(v, _LISTS) for v in values):
            raise EditError(f"'{over.value}' may be a generator, which can be gone through once")
    elif isinstance(over, cst.GeneratorExp):
        raise EditError(f"'{code_of(over)}' is no plain loop over tensors")


def _before_question(place: SourcePlace, torch_: str) -> str:
    """`any(isnan(g).any() for g in ...)` -> `not isfinite(norm) and any(...)`."""
    asked = place.statement.test if isinstance(place.statement, cst.If) else place.statement
    found = [
        (call, _asked(place.module, call, call.args[0].value))
        for call in nodes_of(cst.Call, asked)
        if m.matches(call.func, m.Name("any") | m.Name("all")) and len(call.args) == 1
        if isinstance(call.args[0].value, (cst.GeneratorExp, cst.ListComp))
    ]
    if len(found) != 1 or not isinstance(place.statement, (cst.If, cst.SimpleStatementLine)):
        raise EditError("it is no loop over tensors that are checked")
    [(call, search)] = found
    for _, over in search.loops:
        _see_twice(place, over)
    template = (
        "(not {t}.isfinite({{norm}}) and {{call}})"
        if _is(call, "any")
        else "(bool({t}.isfinite({{norm}})) or {{call}})"
    )
    new = expression(template.format(t=torch_), norm=_norm(search, torch_), call=call)
    return with_expression(place.module, call, new).code


def _is(call: cst.Call, name: str) -> bool:
    return isinstance(call.func, cst.Name) and call.func.value == name


def _asked(module: cst.Module, call: cst.Call, question: cst.GeneratorExp | cst.ListComp) -> _FiniteSearch:
    parts = [question.for_in]
    while (inner := parts[-1].inner_for_in) is not None:
        parts.append(inner)
    ifs = [i.test for part in parts for i in part.ifs]
    is_any = _is(call, "any")
    checked = _found_by(module, question.elt) if is_any else _passed_by(module, question.elt)
    for test in ifs:
        _see_none(test)
    return _FiniteSearch(tuple((p.target, p.iter) for p in parts), tuple(_distinct(checked)), tuple(ifs))


def _search_of(module: cst.Module, loop: cst.For) -> _FiniteSearch:
    """The search that a loop does for values that are not finite.

    Raises EditError when it does anything while all numbers are finite.
    """
    if loop.orelse is not None or loop.asynchronous is not None:
        raise EditError("the loop has an else")
    checked: list[cst.BaseExpression] = []
    ifs: list[cst.BaseExpression] = []
    names: dict[str, cst.BaseExpression] = {}
    _read(module, list(loop.body.body), checked, ifs, names)
    if not checked:
        raise EditError("the loop checks no tensor")
    inner = [_inlined(e, names) for e in checked]
    return _FiniteSearch(
        ((loop.target, loop.iter),),
        tuple(_distinct(inner)),
        tuple(_inlined(i, names) for i in ifs),
        frozenset(names_in(loop.target) | names.keys()),
    )


def _is_none(test: cst.BaseExpression) -> bool:
    return m.matches(test, m.Comparison(comparisons=[m.ComparisonTarget(m.Is(), m.Name("None"))]))


def _read(
    module: cst.Module,
    body: Sequence[cst.CSTNode],
    checked: list[cst.BaseExpression],
    ifs: list[cst.BaseExpression],
    names: dict[str, cst.BaseExpression],
) -> None:
    """Statements of the loop: names for what is checked, guards against None, questions."""
    for index, statement in enumerate(body):
        if isinstance(statement, cst.If) and statement.orelse is None:
            if is_skip(statement) and _is_none(statement.test):
                tested = cst.ensure_type(statement.test, cst.Comparison).left
                ifs.append(expression("{x} is not None", x=tested))
            elif _is_not_none(statement.test) and index == len(body) - 1:
                ifs.append(statement.test)
                _read(module, list(statement.body.body), checked, ifs, names)
            else:
                checked += _found_by(module, statement.test)
            continue
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(small, cst.Assert):
            checked += _passed_by(module, small.test)
        elif isinstance(small, cst.Assign) and m.matches(small, m.Assign(targets=[m.AssignTarget(m.Name())])):
            if not isinstance(small.value, (cst.Name, cst.Attribute)):
                raise EditError(f"the loop also does '{code_of(small)}'")
            names[code_of(small.targets[0].target)] = small.value
        else:
            raise EditError(f"the loop also does '{code_of(statement).splitlines()[0]}'")


def _inlined(node: cst.BaseExpression, names: dict[str, cst.BaseExpression]) -> cst.BaseExpression:
    for name, value in names.items():
        node = m.replace(node, m.Name(name), value)  # type: ignore[assignment]
    return node


def _found_by(module: cst.Module, test: cst.CSTNode) -> list[cst.BaseExpression]:
    """Tensors of which a test is true only if they hold NaN or infinity."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.Or):
        return [*_found_by(module, test.left), *_found_by(module, test.right)]
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And) and _is_not_none(test.left):
        raise EditError(f"'{code_of(test.left)}' guards the check in one test with it")
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return _passed_by(module, test.expression)
    return [_tested(module, test, "any")]


def _passed_by(module: cst.Module, test: cst.CSTNode) -> list[cst.BaseExpression]:
    """Tensors of which a test is false only if they hold NaN or infinity."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_passed_by(module, test.left), *_passed_by(module, test.right)]
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return _found_by(module, test.expression)
    return [_tested(module, test, "all")]


def _tested(module: cst.Module, test: cst.CSTNode, gathered: str) -> cst.BaseExpression:
    """G of `torch.isnan(G).any()`, `G.isnan().any().item()`, `torch.any(torch.isnan(G))`, `bool(...)`."""
    if isinstance(test, cst.Call):
        if isinstance(test.func, cst.Name) and test.func.value == "bool" and len(test.args) == 1:
            return _tested(module, test.args[0].value, gathered)
        method, of = _method(module, test)
        if method == "item" and of is not None:
            return _tested(module, of, gathered)
        if method == gathered and isinstance(of, cst.Call):
            asked, tensor = _method(module, of)
            if tensor is not None and _ASKS.get(asked) == gathered:
                return tensor
    raise EditError(f"'{code_of(test)}' is no check for NaN or infinity alone")


def _method(module: cst.Module, call: cst.Call) -> tuple[str, cst.BaseExpression | None]:
    """The name of a function of torch or a method of a tensor, called with nothing else, and its tensor."""
    name = call_name(module, call.func)
    if name.startswith("torch.") and name.count(".") == 1:
        return name[6:], call.args[0].value if len(call.args) == 1 else None
    if isinstance(call.func, cst.Attribute) and not call.args:
        return call.func.attr.value, call.func.value
    return "", None


def _is_not_none(test: cst.CSTNode) -> bool:
    return m.matches(test, m.Comparison(comparisons=[m.ComparisonTarget(m.IsNot(), m.Name("None"))]))


def _see_none(test: cst.BaseExpression) -> None:
    if not _is_not_none(test) and not m.matches(test, m.Attribute(attr=m.Name("requires_grad"))):
        raise EditError(f"'{code_of(test)}' chooses what is checked")


def _distinct(nodes: Sequence[cst.BaseExpression]) -> list[cst.BaseExpression]:
    return list({code_of(n): n for n in nodes}.values())


def _norm(search: _FiniteSearch, torch_: str) -> cst.BaseExpression:
    """`torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])`."""
    loops = " ".join(f"for {code_of(t)} in {code_of(i)}" for t, i in _shorter(search))
    ifs = "".join(f" if {code_of(test)}" for test in search.ifs)
    checked = [code_of(e) for e in search.checked]
    if len(checked) == 1:
        tensors = f"[{checked[0]} {loops}{ifs}]"
    else:
        each = "tensor"
        tensors = f"[{each} {loops}{ifs} for {each} in ({', '.join(checked)})]"
    return cst.parse_expression(f"{torch_}.nn.utils.get_total_norm({tensors})")


def _shorter(search: _FiniteSearch) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """The loops, with `parameters()` for `named_parameters()` where no name is wanted."""
    wanted = set().union(*(names_in(e) for e in (*search.checked, *search.ifs)))
    loops = list(search.loops)
    for index, (target, over) in enumerate(loops):
        is_named = m.matches(over, m.Call(func=m.Attribute(attr=m.Name("named_parameters")), args=[]))
        pair = isinstance(target, cst.Tuple) and len(target.elements) == 2
        if is_named and pair and len(loops) == 1:
            assert isinstance(target, cst.Tuple)
            first, second = (e.value for e in target.elements)
            if isinstance(first, cst.Name) and isinstance(second, cst.Name) and first.value not in wanted:
                owner = cst.ensure_type(cst.ensure_type(over, cst.Call).func, cst.Attribute).value
                loops[index] = (second, expression("{m}.parameters()", m=owner))
    return loops


LEVER = source_lever(
    __name__,
    edit,
    title="One check for all gradients",
    else_because="no tensors are searched for NaN or infinity",
    loops=(True, False),
    saved_fraction=_SAVED,
)
