"""Pieces of expressions: operands in parentheses where needed, subscripts, reductions of the rows that a mask selects."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.core.errors import EditError
from flatout.tune.rewrite.source import code_of, expression


def atom(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression, in parentheses where it needs them to be an operand of anything."""
    simple = (cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.Integer, cst.Float, cst.List, cst.SimpleString)
    if isinstance(node, simple) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def inverted(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression `~node`, in parentheses where needed."""
    return expression("~{x}", x=atom(node))


def as_operand(new: cst.BaseExpression, old: cst.BaseExpression) -> cst.BaseExpression:
    """An operand of a changed expression: itself where its kind is the same, else in parentheses where needed."""
    return new if new is old or type(new) is type(old) else atom(new)


def last_name(func: cst.BaseExpression) -> str:
    """The bare name of a function or method."""
    if isinstance(func, cst.Attribute):
        return func.attr.value
    return func.value if isinstance(func, cst.Name) else ""


def width_of(part: cst.Slice) -> cst.BaseExpression | None:
    """The width w of a slice `a : a + w`; None for other slices."""
    high = part.upper
    if isinstance(high, cst.BinaryOperation) and isinstance(high.operator, cst.Add) and part.lower is not None:
        if code_of(high.left) == code_of(part.lower):
            return high.right
        if code_of(high.right) == code_of(part.lower):
            return high.left
    return None


def all_rows() -> cst.SubscriptElement:
    """The slice `:` as an element of a subscript."""
    return cst.SubscriptElement(cst.Slice(lower=None, upper=None))


def subscripted(node: cst.BaseExpression, slices: Sequence[cst.SubscriptElement]) -> cst.Subscript:
    """The expression `node[...]` with these slices."""
    between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(slices) - 1
    parts = [s.with_changes(comma=between if n < last else cst.MaybeSentinel.DEFAULT) for n, s in enumerate(slices)]
    return cst.Subscript(value=atom(node), slice=parts)


def reduction_dim(name: str, args: Sequence[cst.Arg]) -> str | None:
    """The dimension that a reduction is along; None for all."""
    if not args:
        return None
    argument = args[0]
    if len(args) > 1 or (argument.keyword is not None and argument.keyword.value not in ("dim", "axis")):
        raise EditError(f"'{name}' has more arguments than a dimension")
    return code_of(argument.value)


def reduced_where(
    name: str, value: cst.BaseExpression, mask: cst.BaseExpression, *, torch: str, is_by_row: bool, is_mask: bool
) -> cst.BaseExpression:
    """The reduction `value[mask].name()` without selecting rows; `is_by_row` reduces along the first dimension only.

    Sums and means by row are a product with the mask, which fits one and two dimensions; without `is_by_row`, one is meant.
    """
    inside = value.with_changes(lpar=[], rpar=[]) if len(code_of(value).splitlines()) == 1 else value
    share = " / {m}.sum()" if name == "mean" else ""
    template = {
        "numel": "{m}.sum()",
        "any": "({v} & {m}).any()",
        "all": "({v} | ~{m}).all()",
        "norm": f"{torch}.where({{m}}, {{x}}, 0).norm()",
        "prod": f"{torch}.where({{m}}, {{x}}, 1).prod()",
        "logsumexp": f"{torch}.logsumexp({{v}}.masked_fill(~{{m}}, -{torch}.inf), dim=0)",
    }.get(name, "")
    if name in ("sum", "mean"):
        template = f"{torch}.where({{m}}, {{x}}, 0).sum(){share}"
        if is_mask and name == "sum":
            template = "({v} & {m}).sum()"
        elif is_by_row:
            template = f"({{m}}.to({{v}}.dtype) @ {{v}}){share}"
    elif not template:
        fill = f".masked_fill(~{{m}}, {'-' if 'max' in name else ''}{torch}.inf)"
        template = f"{{v}}.movedim(0, -1){fill}.{name}(dim=-1)" if is_by_row else f"{{v}}{fill}.{name}()"
    nodes = {"v": atom(value), "x": inside, "m": atom(mask)}
    return expression(template, **{n: node for n, node in nodes.items() if f"{{{n}}}" in template})
