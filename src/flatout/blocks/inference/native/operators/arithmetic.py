"""Arithmetic of one or two tensors, element by element, in float32, whole numbers or truth values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flatout.blocks.inference.native.nodes import aten
from flatout.blocks.inference.native.operator_table import (
    NativeOperator,
    float_function,
    float_operator,
    pointwise_operator,
)
from flatout.blocks.inference.native.values import CExpression, Expr, Scalar, cast

_ROUNDING: Final = {None: "{0}", "floor": "fo_floor({0})", "trunc": "fo_trunc({0})"}
_POWERS: Final = {
    2.0: "({0} * {0})",
    3.0: "({0} * {0} * {0})",
    1.0: "{0}",
    0.5: "fo_sqrt({0})",
    -0.5: "fo_rsqrt({0})",
}
"""Exponents that are written out."""


def _binary(sign: str) -> Callable[..., Expr]:
    def expression(x: Expr, y: Expr, alpha: float | Scalar = 1, *, dtype: str) -> Expr:
        x, y = cast(x, dtype), cast(y, dtype)
        factor = alpha if isinstance(alpha, Scalar) else Scalar(alpha)
        if factor.value != 1:
            y = CExpression("({0} * {1})", (y, cast(factor, dtype)), dtype)
        if dtype == "bool":  # true and true make true, not 2
            return CExpression({"+": "({0} | {1})", "*": "({0} & {1})"}[sign], (x, y), dtype)
        return CExpression(f"({{0}} {sign} {{1}})", (x, y), dtype)

    return expression


def _reversed_subtraction(x: Expr, y: Expr, alpha: float | Scalar = 1, *, dtype: str) -> Expr:
    return _binary("-")(y, x, alpha=alpha, dtype=dtype)


def _division(x: Expr, y: Expr, *, rounding_mode: str | None = None) -> Expr:
    quotient = CExpression("({0} / {1})", (x, y), "float32")
    return quotient if rounding_mode is None else CExpression(_ROUNDING[rounding_mode], (quotient,), "float32")


def _power(x: Expr, y: Expr) -> Expr:
    template = _POWERS.get(y.value) if isinstance(y, Scalar) else None
    return CExpression(template or "fo_pow({0}, {1})", (x, y), "float32")


def _negation(x: Expr, *, dtype: str) -> Expr:
    return CExpression("(-{0})", (cast(x, dtype),), dtype)


def _absolute(x: Expr, *, dtype: str) -> Expr:
    if dtype == "float32":
        return CExpression("fo_abs({0})", (x,), dtype)
    return CExpression("fo_abs_int64({0})", (cast(x, dtype),), dtype)


OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.add: pointwise_operator(_binary("+")),
    aten.sub: pointwise_operator(_binary("-")),
    aten.mul: pointwise_operator(_binary("*")),
    aten.rsub: pointwise_operator(_reversed_subtraction),
    aten.div: float_operator("a division", _division),
    aten.pow: float_operator("a power", _power),
    aten.fmod: float_function("fo_fmod"),
    aten.remainder: float_function("fo_remainder"),
    aten.neg: pointwise_operator(_negation),
    aten.abs: pointwise_operator(_absolute),
}
