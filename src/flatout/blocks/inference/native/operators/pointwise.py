"""Operators that work element by element, by their C expressions: arithmetic, functions, logic, selection, conversions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, aten, broadcast_box, native_dtype_name
from flatout.blocks.inference.native.operator_table import NativeOperator, by_element
from flatout.blocks.inference.native.values import CExpression, Expr, Lazy, Scalar, Value, cast, promoted

Expression: TypeAlias = Callable[..., Expr]
"""From the arguments' expressions, in torch's order (None where one is None), torch's options, and the result's type as `dtype`
to the result's expression."""
_OPTIONS: Final = {"alpha", "rounding_mode", "approximate"}


def _pointwise(expression: Expression) -> NativeOperator:
    """An operator whose arguments and result are computed by one expression for each element."""

    def lower(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
        unknown = sorted(node.kwargs.keys() - _OPTIONS)
        if unknown:
            raise NotImplementedError(f"{node.target} with {', '.join(unknown)}")
        dtype = native_dtype_name(node.meta["val"].dtype)
        args = [_argument(low, arg, box, shape) for arg in node.args]
        return Lazy(cast(expression(*args, **node.kwargs, dtype=dtype), dtype), shape, dtype)

    return NativeOperator(lower=lower, inputs=by_element)


def _argument(low: Lowering, arg: Any, box: Box, shape: tuple[int, ...]) -> Expr | None:
    """An argument of a node as an expression over `shape`: the part of a tensor that broadcasts to it, or a number."""
    if isinstance(arg, Node):
        return low.expression(arg, broadcast_box(arg, box), shape)
    return None if arg is None else Scalar(arg)


def _float_operator(what: str, expression: Expression) -> NativeOperator:
    """An operator of float32 numbers alone; whole numbers are refused where torch would return whole numbers."""

    def of_floats(*args: Expr, dtype: str, **options: Any) -> Expr:
        if dtype != "float32":
            raise NotImplementedError(f"{what} of whole numbers")
        return expression(*(cast(arg, dtype) for arg in args), **options)

    return _pointwise(of_floats)


def _float_function(name: str) -> NativeOperator:
    """An operator that is a C function of float32 numbers."""
    return _float_operator(name.removeprefix("fo_"), lambda *args: _c_call(name, *args))


def _c_call(name: str, *args: Expr) -> CExpression:
    """A call of a C function that returns a float."""
    return CExpression(f"{name}({', '.join(f'{{{i}}}' for i in range(len(args)))})", args, "float32")


# -- arithmetic of one or two tensors, in float32, whole numbers or truth values ---------------------------------------------


_ROUNDING: Final = {"floor": "fo_floor({0})", "trunc": "fo_trunc({0})"}
_POWERS: Final = {
    2.0: "({0} * {0})",
    3.0: "({0} * {0} * {0})",
    1.0: "{0}",
    0.5: "fo_sqrt({0})",
    -0.5: "fo_rsqrt({0})",
}
"""Exponents that are written out."""


def _binary(sign: str) -> Expression:
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


def _absolute(x: Expr, *, dtype: str) -> Expr:
    if dtype == "float32":
        return CExpression("fo_abs({0})", (x,), dtype)
    return CExpression("fo_abs_int64({0})", (cast(x, dtype),), dtype)


# -- elementary functions and activations of one number ----------------------------------------------------------------------


_FUNCTIONS: Final = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "erf"),
    *("sin", "cos", "atan", "sinh", "cosh", "tanh", "sign", "floor", "ceil", "round", "trunc"),
    *("sigmoid", "relu", "silu", "mish", "hardsigmoid", "hardswish", "fmod", "remainder"),
)
"""Operators that C functions are named after."""


def _gelu(x: Expr, *, approximate: str = "none", dtype: str) -> Expr:
    return _c_call("fo_gelu_tanh" if approximate == "tanh" else "fo_gelu", x)


def _with_numbers(name: str, *defaults: float) -> Expression:
    """A C function of one number and of some that the model fixes, which are `defaults` where it does not."""

    def expression(x: Expr, *numbers: Expr | None, dtype: str) -> CExpression:
        fixed = zip_longest(numbers, defaults)
        return _c_call(name, x, *(Scalar(float(n.value if isinstance(n, Scalar) else d)) for n, d in fixed))

    return expression


# -- comparisons, logic of truth values and of bits, selection of one of two numbers, conversions ----------------------------


_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL: Final = {"not": "(!{0})", "and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} ^ {1})"}


def _comparison(sign: str) -> Expression:
    def expression(x: Expr, y: Expr, *, dtype: str) -> Expr:
        common = promoted((x, y))
        return CExpression(f"({{0}} {sign} {{1}})", (cast(x, common), cast(y, common)), "bool")

    return expression


def _logical(template: str) -> Expression:
    return lambda *args, dtype: CExpression(template, tuple(cast(a, "bool") for a in args), "bool")


def _in_result_type(template: str) -> Expression:
    """A template for arguments of the result's type."""
    return lambda *args, dtype: CExpression(template, tuple(cast(a, dtype) for a in args), dtype)


def _bitwise_not(x: Expr, *, dtype: str) -> Expr:
    return CExpression("(!{0})" if dtype == "bool" else "(~{0})", (cast(x, dtype),), dtype)


def _extremum(name: str) -> Expression:
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


def _convert(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    """The first argument in the result's type; options say nothing that native code does not know."""
    dtype = native_dtype_name(node.meta["val"].dtype)
    x = _argument(low, node.args[0], box, shape)
    assert x is not None
    return Lazy(cast(x, dtype), shape, dtype)


_CONVERSION: Final = NativeOperator(lower=_convert, inputs=by_element)
_CONVERSIONS: Final = ("lift_fresh_copy", "detach", "contiguous", "_to_copy", "to", "positive", "dropout")
"""Operators that change the type at most."""

OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.add: _pointwise(_binary("+")),
    aten.sub: _pointwise(_binary("-")),
    aten.mul: _pointwise(_binary("*")),
    aten.rsub: _pointwise(_reversed_subtraction),
    aten.div: _float_operator("a division", _division),
    aten.pow: _float_operator("a power", _power),
    aten.neg: _pointwise(_in_result_type("(-{0})")),
    aten.abs: _pointwise(_absolute),
    **{getattr(aten, name): _float_function(f"fo_{name}") for name in _FUNCTIONS},
    aten.reciprocal: _float_function("fo_recip"),
    aten.gelu: _pointwise(_gelu),
    aten.leaky_relu: _pointwise(_with_numbers("fo_leaky_relu", 0.01)),
    aten.elu: _pointwise(_with_numbers("fo_elu", 1, 1, 1)),
    aten.softplus: _pointwise(_with_numbers("fo_softplus", 1, 20)),
    aten.hardtanh: _pointwise(_with_numbers("fo_hardtanh", -1, 1)),
    **{getattr(aten, name): _pointwise(_comparison(sign)) for name, sign in _COMPARISONS.items()},
    **{getattr(aten, f"logical_{name}"): _pointwise(_logical(text)) for name, text in _LOGICAL.items()},
    aten.bitwise_and: _pointwise(_in_result_type("({0} & {1})")),
    aten.bitwise_or: _pointwise(_in_result_type("({0} | {1})")),
    aten.bitwise_xor: _pointwise(_in_result_type("({0} ^ {1})")),
    aten.bitwise_not: _pointwise(_bitwise_not),
    aten.isnan: _pointwise(lambda x, dtype: CExpression("({0} != {0})", (x,), "bool")),
    aten.isinf: _pointwise(lambda x, dtype: CExpression("(fo_abs({0}) == INFINITY)", (x,), "bool")),
    aten.minimum: _pointwise(_extremum("fo_min")),
    aten.maximum: _pointwise(_extremum("fo_max")),
    aten.clamp: _pointwise(_clamp),
    aten.where: _pointwise(_where),
    aten.masked_fill: _pointwise(lambda x, mask, value, dtype: _where(mask, value, x, dtype=dtype)),
    **{getattr(aten, name): _CONVERSION for name in _CONVERSIONS},
}
