"""Operators that work element by element, as C expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from flatout.inference.native.values import Call, Expr, Scalar, View

aten = torch.ops.aten
C_TYPES: Final = {
    "float32": "float",
    "int32": "int32_t",
    "int64": "int64_t",
    "bool": "uint8_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
}


def dtype_of(expr: Expr) -> str:
    """Of what an expression gives."""
    if isinstance(expr, Scalar):
        return {bool: "bool", int: "int64", float: "float32"}[type(expr.value)]
    return expr.dtype


def cast(expr: Expr, dtype: str) -> Expr:
    """As another type, as torch converts."""
    have = dtype_of(expr)
    if have == dtype:
        return expr
    if isinstance(expr, Scalar):
        return Scalar({"float32": float, "bool": bool}.get(dtype, int)(expr.value))
    if dtype == "bool":
        return Call("({0} != 0)", (expr,), "bool")
    if have == "float32":  # outside its range C leaves the result open; so does torch
        return Call(f"fo_to_{dtype}({{0}})", (expr,), dtype)
    return Call(f"(({C_TYPES[dtype]})({{0}}))", (expr,), dtype)


_UNARY: Final = {
    "exp": "fo_exp", "exp2": "fo_exp2", "expm1": "fo_expm1", "log": "fo_log", "log2": "fo_log2", "log10": "fo_log10",
    "log1p": "fo_log1p", "sigmoid": "fo_sigmoid", "tanh": "fo_tanh", "erf": "fo_erf", "sin": "fo_sin", "cos": "fo_cos",
    "atan": "fo_atan", "sinh": "fo_sinh", "cosh": "fo_cosh", "sqrt": "fo_sqrt", "rsqrt": "fo_rsqrt",
    "reciprocal": "fo_recip", "relu": "fo_relu", "silu": "fo_silu", "mish": "fo_mish", "hardsigmoid": "fo_hardsigmoid",
    "hardswish": "fo_hardswish", "sign": "fo_sign", "floor": "fo_floor", "ceil": "fo_ceil", "round": "fo_round",
    "trunc": "fo_trunc",
}  # fmt: skip
_COMPARED: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _unary(name: str) -> Callable[..., Expr]:
    def made(x: Expr, **_: Any) -> Expr:
        return Call(f"{name}({{0}})", (cast(x, "float32"),), "float32")

    return made


def _compared(sign: str) -> Callable[..., Expr]:
    def made(x: Expr, y: Expr) -> Expr:
        wide = promoted((x, y))
        return Call(f"({{0}} {sign} {{1}})", (cast(x, wide), cast(y, wide)), "bool")

    return made


def promoted(args: Sequence[Expr]) -> str:
    """The type that all can be compared in."""
    dtypes = {dtype_of(a) for a in args}
    return "float32" if "float32" in dtypes else "int64" if dtypes - {"bool"} else "bool"


def _arithmetic(sign: str) -> Callable[..., Expr]:
    def made(x: Expr, y: Expr, *, alpha: float = 1, dtype: str = "float32") -> Expr:
        x, y = cast(x, dtype), cast(y, dtype)
        if alpha != 1:
            y = Call("({0} * {1})", (y, cast(Scalar(alpha), dtype)), dtype)
        if dtype == "bool":  # true and true make true, not 2
            return Call({"+": "({0} | {1})", "*": "({0} & {1})"}[sign], (x, y), dtype)
        return Call(f"({{0}} {sign} {{1}})", (x, y), dtype)

    return made


def _rsub(x: Expr, y: Expr, alpha: float = 1, **options: Any) -> Expr:
    return _arithmetic("-")(y, x, alpha=alpha, **options)


def _divided(x: Expr, y: Expr, *, rounding_mode: str | None = None, dtype: str = "float32") -> Expr:
    if dtype != "float32":
        raise NotImplementedError("a division of whole numbers")
    made = Call("({0} / {1})", (cast(x, dtype), cast(y, dtype)), dtype)
    ways = {None: "{0}", "floor": "fo_floor({0})", "trunc": "fo_trunc({0})"}
    return made if rounding_mode is None else Call(ways[rounding_mode], (made,), dtype)


def _pair(name: str) -> Callable[..., Expr]:
    def made(x: Expr, y: Expr, *, dtype: str = "float32") -> Expr:
        if dtype == "float32":
            return Call(f"{name}({{0}}, {{1}})", (cast(x, dtype), cast(y, dtype)), dtype)
        if name in ("fo_min", "fo_max"):
            return Call(f"{name}_int64({{0}}, {{1}})", (cast(x, dtype), cast(y, dtype)), dtype)
        raise NotImplementedError(f"{name} of whole numbers")

    return made


def _power(x: Expr, y: Expr, *, dtype: str = "float32") -> Expr:
    if dtype != "float32":
        raise NotImplementedError("a power of whole numbers")
    x = cast(x, dtype)
    if isinstance(y, Scalar):
        if y.value == 2:
            return Call("({0} * {0})", (x,), dtype)
        if y.value == 3:
            return Call("({0} * {0} * {0})", (x,), dtype)
        if y.value == 0.5:
            return Call("fo_sqrt({0})", (x,), dtype)
        if y.value == -0.5:
            return Call("fo_rsqrt({0})", (x,), dtype)
        if y.value == 1:
            return x
    return Call("fo_pow({0}, {1})", (x, cast(y, dtype)), dtype)


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None, *, dtype: str = "float32") -> Expr:
    made = cast(x, dtype)
    if low is not None:
        made = _pair("fo_max")(made, low, dtype=dtype)
    if high is not None:
        made = _pair("fo_min")(made, high, dtype=dtype)
    return made


def _where(condition: Expr, x: Expr, y: Expr, *, dtype: str = "float32") -> Expr:
    name = "fo_pick" if dtype == "float32" else "fo_pick_int64"
    return Call(f"{name}({{0}} != 0, {{1}}, {{2}})", (cast(condition, "bool"), cast(x, dtype), cast(y, dtype)), dtype)


def _filled(x: Expr, mask: Expr, value: Expr, *, dtype: str = "float32") -> Expr:
    return _where(mask, value, x, dtype=dtype)


def _gelu(x: Expr, *, approximate: str = "none") -> Expr:
    return Call("fo_gelu_tanh({0})" if approximate == "tanh" else "fo_gelu({0})", (x,), "float32")


def _number(value: object, default: float) -> Scalar:
    return Scalar(float(value.value)) if isinstance(value, Scalar) else Scalar(default)


def _leaky(x: Expr, slope: Expr | None = None) -> Expr:
    return Call("fo_leaky_relu({0}, {1})", (x, _number(slope, 0.01)), "float32")


def _elu(x: Expr, alpha: Expr | None = None, scale: Expr | None = None, into: Expr | None = None) -> Expr:
    return Call("fo_elu({0}, {1}, {2}, {3})", (x, _number(alpha, 1), _number(scale, 1), _number(into, 1)), "float32")


def _softplus(x: Expr, beta: Expr | None = None, threshold: Expr | None = None) -> Expr:
    return Call("fo_softplus({0}, {1}, {2})", (x, _number(beta, 1), _number(threshold, 20)), "float32")


def _hardtanh(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    return Call("fo_hardtanh({0}, {1}, {2})", (x, _number(low, -1), _number(high, 1)), "float32")


def _logical(template: str) -> Callable[..., Expr]:
    def made(*args: Expr) -> Expr:
        return Call(template, tuple(cast(a, "bool") for a in args), "bool")

    return made


def _bits(sign: str) -> Callable[..., Expr]:
    def made(x: Expr, y: Expr, *, dtype: str = "bool") -> Expr:
        return Call(f"({{0}} {sign} {{1}})", (cast(x, dtype), cast(y, dtype)), dtype)

    return made


def _not_bits(x: Expr, *, dtype: str = "bool") -> Expr:
    return Call("(!{0})" if dtype == "bool" else "(~{0})", (cast(x, dtype),), dtype)


def _negated(x: Expr, *, dtype: str = "float32") -> Expr:
    return Call("(-{0})", (cast(x, dtype),), dtype)


def _absolute(x: Expr, *, dtype: str = "float32") -> Expr:
    if dtype == "float32":
        return Call("fo_abs({0})", (x,), dtype)
    return Call("fo_abs_int64({0})", (cast(x, dtype),), dtype)


MADE: Final[dict[str, Callable[..., Expr]]] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _compared(sign) for name, sign in _COMPARED.items()},
    "add": _arithmetic("+"), "sub": _arithmetic("-"), "mul": _arithmetic("*"), "rsub": _rsub, "div": _divided, "pow": _power,
    "minimum": _pair("fo_min"), "maximum": _pair("fo_max"), "fmod": _pair("fo_fmod"), "remainder": _pair("fo_remainder"),
    "clamp": _clamp, "where": _where, "masked_fill": _filled, "gelu": _gelu, "leaky_relu": _leaky, "elu": _elu,
    "softplus": _softplus, "hardtanh": _hardtanh, "logical_not": _logical("(!{0})"),
    "logical_and": _logical("({0} & {1})"), "logical_or": _logical("({0} | {1})"),
    "logical_xor": _logical("({0} ^ {1})"), "bitwise_and": _bits("&"), "bitwise_or": _bits("|"),
    "bitwise_xor": _bits("^"), "bitwise_not": _not_bits, "neg": _negated, "abs": _absolute,
    "isnan": lambda x: Call("({0} != {0})", (x,), "bool"),
    "isinf": lambda x: Call("(fo_abs({0}) == INFINITY)", (x,), "bool"),
}  # fmt: skip
_TAKES_DTYPE: Final = {"add", "sub", "mul", "rsub", "div", "pow", "minimum", "maximum", "fmod", "remainder", "clamp", "where",
                       "masked_fill", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "neg", "abs"}  # fmt: skip
SAME: Final = {"clone", "alias", "lift_fresh_copy", "detach", "contiguous", "_to_copy", "to", "positive", "dropout"}


def name_of(target: object) -> str:
    """Of an ATen operator without its overload: "add"."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None and getattr(target, "namespace", "aten") == "aten" else ""


def is_pointwise(node: Node) -> bool:
    """Whether this module knows the node's operator."""
    return name_of(node.target) in MADE or name_of(node.target) in SAME


def expression(node: Node, args: list[Expr | None], options: dict[str, Any], dtype: str) -> Expr:
    """What a node computes of its arguments; `dtype` is what it gives. Raises NotImplementedError with what is missing."""
    name = name_of(node.target)
    if name in SAME:
        assert args[0] is not None
        return cast(args[0], dtype)
    if dtype != "float32" and name in ("floor", "ceil", "round", "trunc", "relu", "sign"):
        raise NotImplementedError(f"{name} of whole numbers")
    if name in _TAKES_DTYPE:
        options = {**options, "dtype": dtype}
    made = MADE[name](*args, **options)
    return made if dtype_of(made) == dtype else cast(made, dtype)


def literal(value: float | bool, dtype: str) -> str:
    """A number in C."""
    if dtype != "float32":
        return str(int(value)) if dtype == "bool" else f"INT64_C({int(value)})"
    value = float(value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if abs(value) > 3.4028235677973366e38:  # as torch rounds a double to float32
        return "INFINITY" if value > 0 else "-INFINITY"
    text = repr(value)
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def text_of(expr: Expr, load: Callable[[View], str]) -> str:
    """The expression in C."""
    if isinstance(expr, View):
        return load(expr)
    if isinstance(expr, Scalar):
        return literal(expr.value, dtype_of(expr))
    return expr.template.format(*(text_of(arg, load) for arg in expr.args))
