"""A formula that torch has as one function is computed by that, in one pass over memory.

What        Layer norm, RMS norm, softmax, GELU, SiLU and cross entropy written out in a function become `F.layer_norm`,
            `F.rms_norm`, `torch.softmax`, `F.gelu`, `F.silu`, `F.cross_entropy`.
Guarantee   BOUNDED: the same sums in another order, half precision summed in float32.
Refuses     Formulas that only look alike: the variance over n - 1, an epsilon outside of the root, other dimensions.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Final, NamedTuple

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.flow import Expression, Flow, without_casts, written_number, written_numbers
from flatout.tune.rewrite.formulas import FormulaReading, NotThisFormula, row_maximum, with_functional
from flatout.tune.rewrite.imports import without_unused_import

_DEFAULT_EPS: Final = 1e-5
"""Of F.layer_norm (documentation of torch 2.13)."""
_CUBIC: Final = 0.044715
"""Of the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
_CLOSE: Final = 1e-3
_ROOTS: Final = ("math.sqrt", "torch.sqrt", "numpy.sqrt")
_TENSORS: Final = ("torch.tensor", "torch.Tensor", "torch.as_tensor")
_LAST: Final = ((-1.0,), (1.0,))
"""The classes' dimension of logits [rows, classes]."""


class Fused(NamedTuple):
    """A call that replaces a formula, with '{F}' for torch.nn.functional, and the parts that it takes over."""

    call: str
    reused: tuple[Expression, ...]


def edit(text: str, parameters: Parameters) -> str:
    """Put torch's function in place of the formula around the line.

    Raises EditError when none is recognised, or a part of it is used besides.
    """
    flow = Flow(text, parameters)
    why = EditError("no formula that torch has as one function was recognised around this line")
    for last in sorted(flow.expressions(), key=lambda e: -e.at):
        for formula in _FORMULAS if last.at >= flow.at and not isinstance(last.node, ast.Name) else ():
            reading = FormulaReading(flow)
            try:
                fused = formula(reading, last)
                reading.check(flow.at in {last.at, *reading.removed})
                changed = with_functional(reading, last, fused.call, reused=fused.reused)
            except NotThisFormula:
                continue
            except EditError as e:
                why = e
                continue
            return without_unused_import(changed, "math").code
    raise why


def _constant(flow: Flow, expr: Expression, depth: int = 8) -> float | None:
    """The value of an expression of numbers, math and torch.tensor."""
    node = flow.value(expr) if isinstance(expr.node, (ast.Name, ast.Attribute)) else None
    node = node or expr.node
    if written_number(node) is not None or not depth:
        return written_number(node)
    if flow.full_name(node) in ("math.pi", "torch.pi", "numpy.pi"):
        return math.pi
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Call) and flow.full_name(node.func) in (*_ROOTS, *_TENSORS):
        parts = list(node.args[0].elts if node.args and isinstance(node.args[0], ast.List) else node.args)[:1]
    values = [_constant(flow, Expression(part, expr.at), depth - 1) for part in parts]
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return None
    if isinstance(node, ast.Call):
        return max(known[0], 0.0) ** 0.5 if flow.full_name(node.func) in _ROOTS else known[0]
    assert isinstance(node, ast.BinOp)
    if isinstance(node.op, ast.Mult):
        return known[0] * known[1]
    if isinstance(node.op, ast.Div) and known[1]:
        return known[0] / known[1]
    return float(known[0] ** known[1]) if isinstance(node.op, ast.Pow) and known[0] > 0 else None


def _scaled(reading: FormulaReading, expr: Expression) -> tuple[float, list[Expression]]:
    """A positive constant, and what it is multiplied by."""
    scale, factors = 1.0, []
    for factor, sign in reading.factors(expr):
        value = _constant(reading.flow, factor)
        if value is not None and value > 0:
            scale *= value**sign
        else:
            reading.check(sign == 1)
            factors.append(factor)
    return scale, factors


def _check_near(value: float, wanted: float) -> None:
    FormulaReading.check(abs(value - wanted) < _CLOSE)


# -- normalisations -------------------------------------------------------------------------------------------------------------


def _norm(reading: FormulaReading, expr: Expression) -> Fused:
    """Layer norm and RMS norm over the last dimension, with or without a weight and a bias."""
    flow, bias, body = reading.flow, None, expr
    added = flow.operation(expr.node)
    if added is not None and added.name == "add" and len(added.args) == 2:
        for one, other in permutations(added.args):
            if _is_parameter(flow, other):
                bias, body = Expression(other, expr.at), Expression(one, expr.at)
    factors = reading.factors(body)
    reading.check(len(factors) in (2, 3))
    return reading.first(
        partial(_normed, divisor=divisor, data=data, weight=weights[0][0] if weights else None, bias=bias)
        for divisor, (data, sign), *weights in permutations(factors)
        if sign == 1 and all(n == 1 and _is_parameter(flow, w.node) for w, n in weights)
    )


def _is_parameter(flow: Flow, node: ast.expr) -> bool:
    constructor = flow.attribute(node)
    return isinstance(constructor, ast.Call) and flow.full_name(constructor.func) == "torch.nn.Parameter"


def _normed(
    reading: FormulaReading,
    *,
    divisor: tuple[Expression, int],
    data: Expression,
    weight: Expression | None,
    bias: Expression | None,
) -> Fused:
    """The data over the root of their mean square, or of their variance where they are centred."""
    square, exponent = reading.power(divisor[0])
    reading.check(exponent * divisor[1] == -0.5)
    parts, eps = reading.maybe(lambda r: r.pair(square, "add")), None
    if parts is not None:
        square, eps = reversed(parts) if written_number(parts[0].node) is not None else parts
    layer = partial(_layer, data=data, square=square, eps=eps, weight=weight, bias=bias)
    rms = partial(_rms, data=data, square=square, eps=eps, weight=weight)
    return reading.first([layer, rms] if bias is None else [layer])


def _layer(
    reading: FormulaReading,
    *,
    data: Expression,
    square: Expression,
    eps: Expression | None,
    weight: Expression | None,
    bias: Expression | None,
) -> Fused:
    x, mean = reading.pair(data, "sub")
    _check_variance(reading, square, x)
    reading.check(reading.same(_averaged(reading, mean), x))
    return _call(reading, "layer", x, weight, bias, eps)


def _rms(
    reading: FormulaReading, *, data: Expression, square: Expression, eps: Expression | None, weight: Expression | None
) -> Fused:
    base, exponent = reading.power(_averaged(reading, square))
    reading.check(exponent == 2 and reading.same(base, data))
    return _call(reading, "rms", data, weight, None, eps)


def _averaged(reading: FormulaReading, expr: Expression) -> Expression:
    """What is averaged over the last dimension."""
    mean = reading.operation(expr, "mean")
    reading.check(mean.dims == (-1.0,) and mean.has_keepdim)
    return mean.args[0]


def _check_variance(reading: FormulaReading, expr: Expression, x: Expression) -> None:
    """Check that it is the variance (over n) of x."""
    found = reading.operation(expr, "var", "mean")
    if found.name == "var":
        unbiased = found.args[2].node if len(found.args) > 2 else found.options.get("unbiased")
        is_biased = isinstance(unbiased, ast.Constant) and unbiased.value is False
        reading.check(is_biased or written_number(found.options.get("correction")) == 0)
        reading.check(found.dims == (-1.0,) and found.has_keepdim and reading.same(found.args[0], x))
        return
    base, exponent = reading.power(_averaged(reading, expr))
    one, mean = reading.pair(base, "sub")
    reading.check(exponent == 2 and reading.same(one, x) and reading.same(_averaged(reading, mean), one))


def _call(
    reading: FormulaReading,
    kind: str,
    x: Expression,
    weight: Expression | None,
    bias: Expression | None,
    eps: Expression | None,
) -> Fused:
    """The call of F.layer_norm or F.rms_norm."""
    flow = reading.flow
    data = without_casts(flow, x)
    before = flow.written(data)
    if (
        before is not None and without_casts(flow, before) != before
    ):  # the data before they were brought to another precision
        reading.removed.add(before.at)
        data = without_casts(flow, before)
    name, scale, shift = (flow.text(part) if part is not None else "" for part in (data, weight, bias))
    reading.check(bool(scale) or isinstance(data.node, ast.Name))
    arguments = [name, f"{scale}.shape" if scale else f"{name}.shape[-1:]"]
    arguments += [scale] if scale else []
    arguments += [shift if scale else f"bias={shift}"] if shift else []
    if kind != "layer" or eps is None or written_number(eps.node) != _DEFAULT_EPS:
        is_in_place = bool(scale) and (kind == "rms" or bool(shift))
        arguments.append(f"{'' if is_in_place else 'eps='}{flow.text(eps) if eps is not None else '0.0'}")
    parts = (data, weight, bias, eps)
    return Fused(f"{{F}}.{kind}_norm({', '.join(arguments)})", tuple(p for p in parts if p is not None))


# -- others ---------------------------------------------------------------------------------------------------------------------


def _softmax(reading: FormulaReading, expr: Expression) -> Fused:
    """The formula exp(x - max) over its sum, as softmax."""
    flow = reading.flow
    divided = reading.here(expr, "div")
    reading.check(len(divided.args) == 2)
    top, below = divided.args
    total, powers = reading.operation(below, "sum"), reading.behind(top)
    reading.check(len(total.dims) == 1 and total.has_keepdim)
    summed = total.args[0]
    reading.check(flow.same(summed, top) or flow.same(reading.behind(summed), powers))
    x = reading.here(powers, "exp").args[0]
    shifted = reading.maybe(lambda r: r.pair(x, "sub"))
    if shifted is not None:
        x, peak = shifted[0], reading.behind(shifted[1])
        largest = row_maximum(flow, peak.node)
        reading.check(largest is not None and written_numbers(largest.option("dim", 1)) == total.dims)
        reading.check(largest is not None and flow.same(Expression(largest.args[0], peak.at), x))
    return Fused(f"{{F}}.softmax({flow.text(x)}, dim={total.dims[0]:.0f})", (x,))


def _gelu(reading: FormulaReading, expr: Expression) -> Fused:
    """The formulas x / 2 * (1 + tanh(...)), x / 2 * (1 + erf(x / sqrt(2))), and x * sigmoid(x)."""
    scale, factors = _scaled(reading, expr)
    reading.check(len(factors) == 2)
    return reading.first(partial(_gated, x=x, gate=gate, scale=scale) for x, gate in permutations(factors))


def _gated(reading: FormulaReading, *, x: Expression, gate: Expression, scale: float) -> Fused:
    """The data times what is made of them."""
    found = reading.operation(gate, "sigmoid", "add")
    name, tail, inner = "silu", "", found.args[0]
    if found.name == "add":
        name, (one, other) = "gelu", reading.pair(gate, "add")
        if written_number(one.node) != 1:
            one, other = other, one
        bent = reading.operation(other, "tanh", "erf")
        reading.check(written_number(one.node) == 1 and len(bent.args) == 1)
        root, factors = _scaled(reading, bent.args[0])
        reading.check(len(factors) == 1)
        inner = factors[0]
        if bent.name == "tanh":
            tail = ', approximate="tanh"'
            inner = reading.first(partial(_cubic, x=a, other=b) for a, b in permutations(reading.pair(inner, "add")))
        _check_near(root, (2 / math.pi) ** 0.5 if tail else 0.5**0.5)
    _check_near(scale, 0.5 if name == "gelu" else 1.0)
    reading.check(reading.flow.same(x, inner))
    return Fused(f"{{F}}.{name}({reading.flow.text(x)}{tail})", (x,))


def _cubic(reading: FormulaReading, *, x: Expression, other: Expression) -> Expression:
    """The x of `x + 0.044715 * x**3`."""
    scale, factors = _scaled(reading, other)
    degree = 0.0
    for factor in factors:
        base, exponent = (factor, 1.0) if reading.flow.same(factor, x) else reading.power(factor)
        reading.check(reading.flow.same(base, x))
        degree += exponent
    reading.check(abs(scale - _CUBIC) < 1e-6 and degree == 3)
    return x


def _cross_entropy(reading: FormulaReading, expr: Expression) -> Fused:
    """Minus the mean of log-softmax at the targets: gathered, indexed, or by a product with one-hot rows."""
    flow, picked, names = reading.flow, reading.behind(expr), []
    while (outer := flow.operation(picked.node)) is not None and outer.name in ("neg", "mean"):
        reading.check(len(outer.args) == 1 and not outer.options)
        names.append(outer.name)
        picked = reading.behind(Expression(outer.args[0], picked.at))
    reading.check(names.count("mean") == 1 and names.count("neg") % 2 == 1)
    logits, targets = _picked(reading, picked)
    softmax = reading.operation(logits, "log_softmax")
    reading.check(softmax.dims in _LAST)
    x = softmax.args[0]
    return Fused(f"{{F}}.cross_entropy({flow.text(x)}, {flow.text(targets)})", (x, targets))


def _picked(reading: FormulaReading, expr: Expression) -> tuple[Expression, Expression]:
    """Rows of which an element each is picked, and the numbers of the elements."""
    flow, node = reading.flow, expr.node
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
        first, second = node.slice.elts
        rows = flow.operation(flow.value(Expression(first, expr.at)) or first)
        if rows is not None and rows.name == "arange":
            return Expression(node.value, expr.at), Expression(second, expr.at)
    found = reading.here(expr, "squeeze", "gather", "sum")
    if found.name == "squeeze":
        found = reading.operation(found.args[0], "gather", "sum")
    if found.name == "sum":
        reading.check(found.dims in _LAST)
        return reading.first(
            partial(_one_hot, logits=a, rows=b) for a, b in permutations(reading.pair(found.args[0], "mul"))
        )
    reading.check(len(found.args) == 3 and found.dims in _LAST)
    column = reading.operation(found.args[2], "unsqueeze", "view", "reshape")
    sizes = [written_number(a.node) for a in column.args[1:]]
    is_column = written_numbers(column.args[-1].node) in _LAST if column.name == "unsqueeze" else sizes == [-1, 1]
    reading.check(is_column)
    return found.args[0], column.args[0]


def _one_hot(reading: FormulaReading, *, logits: Expression, rows: Expression) -> tuple[Expression, Expression]:
    return logits, reading.operation(rows, "one_hot").args[0]


_FORMULAS: Final[tuple[Callable[[FormulaReading, Expression], Fused], ...]] = (_norm, _softmax, _gelu, _cross_entropy)

LEVER = source_lever(
    __name__,
    edit,
    title="Torch's own function for a formula",
    else_because="no sequence of operators is worth one kernel",
)
