"""Selection of one of two numbers, element by element: minimum, clamp, where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flatout.blocks.inference.native.nodes import aten
from flatout.blocks.inference.native.operator_table import NativeOperator, pointwise_operator
from flatout.blocks.inference.native.values import CExpression, Expr, cast


def _extremum(name: str) -> Callable[..., Expr]:
    def expression(x: Expr, y: Expr, *, dtype: str) -> Expr:
        function = name if dtype == "float32" else f"{name}_int64"
        return CExpression(f"{function}({{0}}, {{1}})", (cast(x, dtype), cast(y, dtype)), dtype)

    return expression


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None, *, dtype: str) -> Expr:
    result = cast(x, dtype)
    if low is not None:
        result = _extremum("fo_max")(result, low, dtype=dtype)
    if high is not None:
        result = _extremum("fo_min")(result, high, dtype=dtype)
    return result


def _where(condition: Expr, x: Expr, y: Expr, *, dtype: str) -> Expr:
    name = "fo_pick" if dtype == "float32" else "fo_pick_int64"
    return CExpression(
        f"{name}({{0}} != 0, {{1}}, {{2}})", (cast(condition, "bool"), cast(x, dtype), cast(y, dtype)), dtype
    )


OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.minimum: pointwise_operator(_extremum("fo_min")),
    aten.maximum: pointwise_operator(_extremum("fo_max")),
    aten.clamp: pointwise_operator(_clamp),
    aten.where: pointwise_operator(_where),
    aten.masked_fill: pointwise_operator(lambda x, mask, value, dtype: _where(mask, value, x, dtype=dtype)),
}
