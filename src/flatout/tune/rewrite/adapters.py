"""A linear layer and its low-rank adapter, found in a text as the sum of their results, and written as one call of `lora_linear`.

A product is the call of a module with one argument, `F.linear`, or `@` with a matrix. Whether a module is an nn.Linear the block
checks when it is called, since the class often gets it as an argument.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Final, NamedTuple

from flatout.core.errors import EditError
from flatout.tune.rewrite.flow import Expression, Flow, has_bias
from flatout.tune.rewrite.formulas import FormulaReading, NotThisFormula

BLOCK: Final = "lora_linear"
"""The function of flatout that takes its place."""


class _WrittenProduct(NamedTuple):
    """A product: its input, the texts of its layer or weight and of a bias beside that, and whether it is seen to have a bias."""

    x: Expression
    layer: str
    bias: str = ""
    has_bias: bool = False


class AdapterSum(NamedTuple):
    """A layer's result and that of its adapter, added, as it stands in a block of statements."""

    last: Expression
    """The sum."""
    x: Expression
    arguments: tuple[str, ...]
    removed: frozenset[int]
    """Statements that make its parts."""

    @property
    def call(self) -> str:
        """The sum as one call."""
        return f"{BLOCK}({', '.join(self.arguments)})"


def adapter_sum(flow: Flow) -> AdapterSum:
    """The layer with its adapter around the place of the flow.

    Raises EditError where none is recognised, or the adapter has a bias.
    """
    for last in flow.expressions():
        for is_swapped in (False, True):
            reading = FormulaReading(flow)
            try:
                one, other = reading.pair(last, "add")
                layer = _product(reading, other if is_swapped else one)
                up, outer = _scaled_product(reading, one if is_swapped else other)
                down, inner = _scaled_product(reading, up.x)
                x = reading.behind(layer.x)
                reading.check(reading.same(x, reading.behind(down.x)) and flow.at in {last.at, *reading.removed})
            except NotThisFormula:
                continue
            if up.has_bias or down.has_bias:
                raise EditError("the adapter has a bias")
            scale = _scale_text([*outer, *inner])
            options = [f"bias={layer.bias}"] * bool(layer.bias) + [f"scale={scale}"] * bool(scale)
            arguments = (ast.unparse(x.node), layer.layer, down.layer, up.layer, *options)
            return AdapterSum(last, x, arguments, frozenset(reading.removed))
    raise EditError("no sum of a linear layer's result and a low-rank adapter's was recognised in this line")


def _scaled_product(reading: FormulaReading, expr: Expression) -> tuple[_WrittenProduct, list[tuple[Expression, int]]]:
    """A product, and what its result is multiplied (1) and divided by (-1)."""
    factors = reading.factors(_inlined(reading.flow, reading.behind(expr)))
    for place, (factor, sign) in enumerate(factors):
        product = reading.maybe(partial(_product, expr=factor)) if sign == 1 else None
        if product is not None:
            return product, factors[:place] + factors[place + 1 :]
    raise NotThisFormula


def _product(reading: FormulaReading, expr: Expression) -> _WrittenProduct:
    """The product that an expression is, behind names and casts."""
    flow, expr = reading.flow, reading.behind(expr)
    operation = flow.operation(expr.node)
    if operation is not None and operation.name == "matmul" and len(operation.args) == 2:
        return _WrittenProduct(Expression(operation.args[0], expr.at), _transposed(flow, operation.args[1]))
    call = expr.node
    if not isinstance(call, ast.Call) or not call.args:
        raise NotThisFormula
    x = Expression(call.args[0], expr.at)
    if operation is not None and flow.full_name(call.func) == "torch.nn.functional.linear":
        weight, bias = operation.option("weight", 1), operation.option("bias", 2)
        if weight is None:
            raise NotThisFormula
        return _WrittenProduct(x, ast.unparse(weight), "" if bias is None else ast.unparse(bias), bias is not None)
    constructor = flow.attribute(call.func)
    is_known = isinstance(constructor, ast.Call)
    reading.check(len(call.args) == 1 and not call.keywords and ast.unparse(call.func).startswith("self."))
    reading.check(not is_known or flow.linear(call) is not None)
    return _WrittenProduct(
        x, ast.unparse(call.func), has_bias=isinstance(constructor, ast.Call) and has_bias(constructor)
    )


def _transposed(flow: Flow, node: ast.expr) -> str:
    """The text of a matrix the other way round."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return ast.unparse(node.value)
    operation = flow.operation(node)
    if operation is not None and operation.name == "t" and len(operation.args) == 1:
        return ast.unparse(operation.args[0])
    return f"{ast.unparse(node)}.T" if isinstance(node, (ast.Name, ast.Attribute)) else f"({ast.unparse(node)}).T"


def _scale_text(factors: Sequence[tuple[Expression, int]]) -> str:
    """What an adapter is multiplied by, as a text; '' for nothing."""
    above = [_factor_text(f) for f, sign in factors if sign == 1]
    below = [_factor_text(f) for f, sign in factors if sign == -1]
    return " / ".join([" * ".join(above) or "1", *below]) if factors else ""


def _factor_text(expr: Expression) -> str:
    text = ast.unparse(expr.node)
    return (
        text if isinstance(expr.node, (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript)) else f"({text})"
    )


def _inlined(flow: Flow, expr: Expression) -> Expression:
    """What the call of a module of the file's own computes, where its forward makes one expression of one argument."""
    node = expr.node
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return expr
    kind = flow.own_class(node.func)
    forward = (
        [s for s in kind.body if isinstance(s, ast.FunctionDef) and s.name == "forward"] if kind is not None else []
    )
    if len(forward) != 1 or forward[0].decorator_list or len(forward[0].args.args) != 2:
        return expr
    own, x = (a.arg for a in forward[0].args.args)
    values: dict[str, ast.expr] = {own: node.func, x: node.args[0]}
    for statement in forward[0].body:
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            values[statement.targets[0].id] = _with_values(statement.value, values)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            return Expression(_with_values(statement.value, values), expr.at)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return expr
    return expr


def _with_values(node: ast.expr, values: dict[str, ast.expr]) -> ast.expr:
    """The expression with values in place of names, all at once."""
    found: ast.expr = _Substitution(values).visit(deepcopy(node))
    return found


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self._values[node.id]) if node.id in self._values else node
