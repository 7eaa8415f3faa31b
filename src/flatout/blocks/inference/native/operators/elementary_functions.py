"""Elementary functions and activations of one number: exp, tanh, sqrt, relu, gelu."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Final

from flatout.blocks.inference.native.nodes import aten
from flatout.blocks.inference.native.operator_table import NativeOperator, c_call, float_function, pointwise_operator
from flatout.blocks.inference.native.values import CExpression, Expr, Scalar

_FUNCTIONS: Final = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf"),
    *("sin", "cos", "atan", "sinh", "cosh", "tanh", "sign", "floor", "ceil", "round", "trunc"),
    *("sigmoid", "relu", "silu", "mish", "hardsigmoid", "hardswish"),
)
"""Operators that C functions are named after."""


def _gelu(x: Expr, *, approximate: str = "none", dtype: str) -> Expr:
    return c_call("fo_gelu_tanh" if approximate == "tanh" else "fo_gelu", x)


def _with_numbers(name: str, *defaults: float) -> Callable[..., CExpression]:
    """A C function of one number and of some that the model fixes, which are `defaults` where it does not."""

    def expression(x: Expr, *numbers: Expr | None, dtype: str) -> CExpression:
        fixed = zip_longest(numbers, defaults)
        return c_call(name, x, *(Scalar(float(n.value if isinstance(n, Scalar) else d)) for n, d in fixed))

    return expression


OPERATORS: Final[dict[object, NativeOperator]] = {
    **{getattr(aten, name): float_function(f"fo_{name}") for name in _FUNCTIONS},
    aten.reciprocal: float_function("fo_recip"),
    aten.gelu: pointwise_operator(_gelu),
    aten.leaky_relu: pointwise_operator(_with_numbers("fo_leaky_relu", 0.01)),
    aten.elu: pointwise_operator(_with_numbers("fo_elu", 1, 1, 1)),
    aten.softplus: pointwise_operator(_with_numbers("fo_softplus", 1, 20)),
    aten.hardtanh: pointwise_operator(_with_numbers("fo_hardtanh", -1, 1)),
}
