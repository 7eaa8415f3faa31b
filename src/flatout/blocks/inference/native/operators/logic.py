"""Comparisons, and logic of truth values and of bits, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flatout.blocks.inference.native.nodes import aten
from flatout.blocks.inference.native.operator_table import NativeOperator, pointwise_operator
from flatout.blocks.inference.native.values import CExpression, Expr, cast, promoted

_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL: Final = {"not": "(!{0})", "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})"}


def _comparison(sign: str) -> Callable[..., Expr]:
    def expression(x: Expr, y: Expr, *, dtype: str) -> Expr:
        common = promoted((x, y))
        return CExpression(f"({{0}} {sign} {{1}})", (cast(x, common), cast(y, common)), "bool")

    return expression


def _logical(template: str) -> Callable[..., Expr]:
    return lambda *args, dtype: CExpression(template, tuple(cast(a, "bool") for a in args), "bool")


def _bitwise(template: str) -> Callable[..., Expr]:
    return lambda *args, dtype: CExpression(template, tuple(cast(a, dtype) for a in args), dtype)


def _bitwise_not(x: Expr, *, dtype: str) -> Expr:
    return CExpression("(!{0})" if dtype == "bool" else "(~{0})", (cast(x, dtype),), dtype)


OPERATORS: Final[dict[object, NativeOperator]] = {
    **{getattr(aten, name): pointwise_operator(_comparison(sign)) for name, sign in _COMPARISONS.items()},
    **{getattr(aten, f"logical_{name}"): pointwise_operator(_logical(text)) for name, text in _LOGICAL.items()},
    aten.bitwise_and: pointwise_operator(_bitwise("({0} & {1})")),
    aten.bitwise_or: pointwise_operator(_bitwise("({0} | {1})")),
    aten.bitwise_xor: pointwise_operator(_bitwise("({0} ^ {1})")),
    aten.bitwise_not: pointwise_operator(_bitwise_not),
    aten.isnan: pointwise_operator(lambda x, dtype: CExpression("({0} != {0})", (x,), "bool")),
    aten.isinf: pointwise_operator(lambda x, dtype: CExpression("(fo_abs({0}) == INFINITY)", (x,), "bool")),
}
