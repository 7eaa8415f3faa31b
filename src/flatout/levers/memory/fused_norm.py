"""A formula that torch has as one function is computed by that, in one pass over memory.

What        Layer norm, RMS norm, softmax, GELU, SiLU and cross entropy written out in a function become `F.layer_norm`,
            `F.rms_norm`, `torch.softmax`, `F.gelu`, `F.silu`, `F.cross_entropy`.
Guarantee   BOUNDED: the same sums in another order, half precision summed in float32.
Refuses     Formulas that only look alike: the variance over n - 1, an epsilon outside of the root, other dimensions.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from flatout.errors import EditError
from flatout.levers.syntax.flow import Flow, Seen, functional, number, numbers, without_casts
from flatout.levers.syntax.imports import without_unused_import
from flatout.levers.syntax.source import offered
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal

_DEFAULT_EPS: Final = 1e-5
"""Of F.layer_norm (documentation of torch 2.13)."""
_CUBIC: Final = 0.044715
"""Of the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
_CLOSE: Final = 1e-3
_ROOTS: Final = ("math.sqrt", "torch.sqrt", "numpy.sqrt")
_TENSORS: Final = ("torch.tensor", "torch.Tensor", "torch.as_tensor")


class Fused(NamedTuple):
    """What stands for a formula: a call with '{F}' for torch.nn.functional, what it takes over, statements that led to it."""

    call: str
    kept: tuple[Seen, ...]
    removed: frozenset[int]


class Term(NamedTuple):
    """A part of a formula behind names, and the statements on the way."""

    seen: Seen
    removed: frozenset[int]


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Wherever a chain of operators is such a formula."""
    yield from offered(LEVER.id, evidence, findings, edit, else_because="no chain of operators is worth one kernel")


def edit(text: str, parameters: Parameters) -> str:
    """Put torch's function in place of the formula around the line.

    Raises EditError when none is recognised, or a part of it is used besides.
    """
    flow = Flow(text, parameters)
    why = EditError("no formula that torch has as one function was recognised around this line")
    for last, fused in _found(flow):
        module, prefix = functional(flow.module) if "{F}" in fused.call else (flow.module, "")
        try:
            changed = flow.replaced(
                last, fused.call.replace("{F}", prefix), removed=set(fused.removed), kept=fused.kept
            )
        except EditError as e:
            why = e
            continue
        if module is not flow.module:
            changed, _ = functional(changed)
        return without_unused_import(changed, "math").code
    raise why


def _found(flow: Flow) -> Iterator[tuple[Seen, Fused]]:
    """Formulas that hold the line, the largest first."""
    for index in range(len(flow.trees) - 1, flow.at - 1, -1):
        tree = flow.trees[index]
        if isinstance(tree, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr) or isinstance(node, ast.Name):
                continue
            seen = Seen(node, index)
            for recognise in _FORMULAS:
                fused = recognise(flow, seen)
                if fused is not None and flow.at in {index, *fused.removed}:
                    yield seen, fused


def _behind(flow: Flow, seen: Seen) -> Term:
    removed: set[int] = set()
    while True:
        seen = without_casts(flow, seen)
        before = flow.written(seen)
        if before is None or isinstance(before.node, ast.IfExp):
            return Term(seen, frozenset(removed))
        removed.add(before.at)
        seen = before


def _args(flow: Flow, seen: Seen, *names: str) -> tuple[list[Seen], frozenset[int]] | None:
    """The arguments of an operation of one of these names, behind names."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is None or operation.name not in names:
        return None
    return [Seen(a, inner.at) for a in operation.args], removed


def _factors(flow: Flow, seen: Seen, removed: frozenset[int] = frozenset()) -> list[tuple[Term, int]]:
    """What is multiplied (1) and divided by (-1), through names."""
    inner, more = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is None or operation.name not in ("mul", "div") or len(operation.args) != 2:
        return [(Term(seen, removed), 1)]
    removed |= more
    left, right = (Seen(a, inner.at) for a in operation.args)
    sign = 1 if operation.name == "mul" else -1
    return _factors(flow, left, removed) + [(t, n * sign) for t, n in _factors(flow, right, removed)]


def _is_last(flow: Flow, seen: Seen, dims: ast.expr | None, keep: ast.expr | None) -> bool:
    is_kept = isinstance(keep, ast.Constant) and keep.value is True
    return numbers(dims) == (-1.0,) and is_kept


def _constant(flow: Flow, seen: Seen, depth: int = 8) -> float | None:
    """The value of an expression of numbers, math and torch.tensor."""
    node = flow.value(seen) if isinstance(seen.node, (ast.Name, ast.Attribute)) else None
    node = node or seen.node
    if number(node) is not None or not depth:
        return number(node)
    if flow.full_name(node) in ("math.pi", "torch.pi", "numpy.pi"):
        return math.pi
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Call) and flow.full_name(node.func) in (*_ROOTS, *_TENSORS):
        parts = list(node.args[0].elts if node.args and isinstance(node.args[0], ast.List) else node.args)[:1]
    values = [_constant(flow, Seen(part, seen.at), depth - 1) for part in parts]
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


def _is_near(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) < _CLOSE


# -- normalisations -------------------------------------------------------------------------------------------------------------


class Root(NamedTuple):
    """sqrt(`square` + `eps`), or one over it."""

    square: Seen
    eps: Seen | None
    removed: frozenset[int]


def _norm(flow: Flow, seen: Seen) -> Fused | None:
    """Layer norm and RMS norm over the last dimension, with or without a weight and a bias."""
    bias, removed, body = None, frozenset[int](), seen
    added = flow.operation(seen.node)
    if added is not None and added.name == "add" and len(added.args) == 2:
        for one, other in (added.args, added.args[::-1]):
            if _is_parameter(flow, other):
                bias, body = Seen(other, seen.at), Seen(one, seen.at)
    factors = _factors(flow, body)
    for place, (term, sign) in enumerate(factors):
        root = _root(flow, term, sign)
        rest = [f for i, f in enumerate(factors) if i != place]
        if root is None or not rest or any(n != 1 for _, n in rest) or len(rest) > 2:
            continue
        for (data, _), others in ((f, [g for g in rest if g is not f]) for f in rest):
            if others and not _is_parameter(flow, others[0][0].seen.node):
                continue
            weight = others[0][0] if others else None
            removed = root.removed.union(term.removed, data.removed, weight.removed if weight is not None else ())
            fused = _layer(flow, data, root, removed, weight, bias) or (
                _rms(flow, data, root, removed, weight) if bias is None else None
            )
            if fused is not None:
                return fused
    return None


def _is_parameter(flow: Flow, node: ast.expr) -> bool:
    made = flow.attribute(node)
    return isinstance(made, ast.Call) and flow.full_name(made.func) == "torch.nn.Parameter"


def _root(flow: Flow, term: Term, sign: int) -> Root | None:
    """What the data are divided by."""
    inner, removed = _behind(flow, term.seen)
    operation = flow.operation(inner.node)
    if operation is None or not operation.args:
        return None
    power = number(operation.args[1]) if operation.name == "pow" and len(operation.args) > 1 else None
    below = operation.name == "sqrt" or power == 0.5
    above = operation.name == "rsqrt" or power == -0.5
    if operation.name == "reciprocal" or (operation.name == "div" and number(operation.args[0]) == 1):
        return _root(flow, Term(Seen(operation.args[-1], inner.at), removed), -sign)
    if not (below and sign == -1) and not (above and sign == 1):
        return None
    square = Seen(operation.args[0], inner.at)
    parts = _args(flow, square, "add")
    if parts is None:
        return Root(square, None, removed)
    one, other = parts[0]
    is_turned = number(one.node) is not None
    return Root(other if is_turned else one, one if is_turned else other, removed | parts[1])


def _layer(
    flow: Flow, data: Term, root: Root, removed: frozenset[int], weight: Term | None, bias: Seen | None
) -> Fused | None:
    centred = _args(flow, data.seen, "sub")
    if centred is None:
        return None
    (x, mean), more = centred
    removed |= more
    variance = _variance(flow, root.square, x, Seen(data.seen.node, data.seen.at))
    average = _mean(flow, mean, x)
    if variance is None or average is None:
        return None
    removed |= variance | average
    return _call(flow, "layer", x, removed, weight, bias, root.eps)


def _rms(flow: Flow, data: Term, root: Root, removed: frozenset[int], weight: Term | None) -> Fused | None:
    mean = _behind(flow, root.square)
    operation = flow.operation(mean.seen.node)
    if operation is None or operation.name != "mean":
        return None
    if not _is_last(flow, mean.seen, operation.option("dim", 1), operation.option("keepdim", 2)):
        return None
    squared = _squared(flow, Seen(operation.args[0], mean.seen.at))
    if squared is None or not _is_same(flow, squared[0], data.seen):
        return None
    return _call(flow, "rms", data.seen, removed | mean.removed | squared[1], weight, None, root.eps)


def _mean(flow: Flow, seen: Seen, x: Seen) -> frozenset[int] | None:
    """Statements that lead to the mean of x over the last dimension; None when it is something else."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is None or operation.name != "mean" or not _is_same(flow, Seen(operation.args[0], inner.at), x):
        return None
    return removed if _is_last(flow, inner, operation.option("dim", 1), operation.option("keepdim", 2)) else None


def _variance(flow: Flow, seen: Seen, x: Seen, centred: Seen) -> frozenset[int] | None:
    """Statements that lead to the variance (over n) of x."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is None or not operation.args:
        return None
    first = Seen(operation.args[0], inner.at)
    if operation.name == "var":
        unbiased, correction = operation.options.get("unbiased"), operation.options.get("correction")
        if len(operation.args) > 2 and isinstance(operation.args[2], ast.Constant):
            unbiased = operation.args[2]
        is_over_n = (isinstance(unbiased, ast.Constant) and unbiased.value is False) or number(correction) == 0
        keep = operation.option("keepdim", 3)
        is_it = is_over_n and _is_last(flow, inner, operation.option("dim", 1), keep) and _is_same(flow, first, x)
        return removed if is_it else None
    if operation.name == "mean" and _is_last(flow, inner, operation.option("dim", 1), operation.option("keepdim", 2)):
        squared = _squared(flow, first)
        if squared is None:
            return None
        difference = _args(flow, squared[0], "sub")
        if difference is None:
            return None
        (one, mean), more = difference
        average = _mean(flow, mean, one)
        return removed | squared[1] | more | average if average is not None and _is_same(flow, one, x) else None
    return None


def _squared(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]] | None:
    """What a square is the square of."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is None or not operation.args:
        return None
    args = [Seen(a, inner.at) for a in operation.args]
    if operation.name == "square" or (operation.name == "pow" and number(operation.args[1]) == 2):
        return args[0], removed
    return (args[0], removed) if operation.name == "mul" and flow.same(args[0], args[1]) else None


def _is_same(flow: Flow, one: Seen, two: Seen) -> bool:
    return flow.same(without_casts(flow, one), without_casts(flow, two))


def _call(
    flow: Flow, kind: str, x: Seen, removed: frozenset[int], weight: Term | None, bias: Seen | None, eps: Seen | None
) -> Fused | None:
    """The call of F.layer_norm or F.rms_norm."""
    data, casts = _uncast(flow, x)
    name = flow.text(data)
    scale = flow.text(weight.seen) if weight is not None else ""
    if not scale and not isinstance(data.node, ast.Name):
        return None
    arguments = [name, f"{scale}.shape" if scale else f"{name}.shape[-1:]"]
    shift = flow.text(bias) if bias is not None else ""
    arguments += [scale] if scale else []
    arguments += [shift if scale else f"bias={shift}"] if shift else []
    written = flow.text(eps) if eps is not None else "0.0"
    is_default = kind == "layer" and eps is not None and number(eps.node) == _DEFAULT_EPS
    is_in_place = bool(scale) and (kind == "rms" or bool(shift))
    arguments += [] if is_default else [written if is_in_place else f"eps={written}"]
    kept = (data, *(s for s in (weight.seen if weight is not None else None, bias, eps) if s is not None))
    return Fused(f"{{F}}.{kind}_norm({', '.join(arguments)})", kept, removed | casts)


def _uncast(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]]:
    """The data before they were brought to another precision."""
    seen = without_casts(flow, seen)
    before = flow.written(seen)
    if before is not None and without_casts(flow, before) != before:
        return without_casts(flow, before), frozenset({before.at})
    return seen, frozenset()


# -- others ---------------------------------------------------------------------------------------------------------------------


def _softmax(flow: Flow, seen: Seen) -> Fused | None:
    """exp(x - max) over its sum."""
    divided = flow.operation(seen.node)
    if divided is None or divided.name != "div" or len(divided.args) != 2:
        return None
    top, below = Seen(divided.args[0], seen.at), Seen(divided.args[1], seen.at)
    total, removed = _behind(flow, below)
    summed = flow.operation(total.node)
    powers, more = _behind(flow, top)
    raised = flow.operation(powers.node)
    if summed is None or summed.name != "sum" or raised is None or raised.name != "exp":
        return None
    dim, keep = numbers(summed.option("dim", 1)), summed.option("keepdim", 2)
    if len(dim) != 1 or not (isinstance(keep, ast.Constant) and keep.value is True):
        return None
    one = Seen(summed.args[0], total.at)
    inner, also = _behind(flow, one)
    if not flow.same(one, top) and not flow.same(inner, powers):
        return None
    removed = removed | more | also
    x = Seen(raised.args[0], powers.at)
    shifted = _args(flow, x, "sub")
    if shifted is not None:
        (data, largest), through = shifted
        peak, on_the_way = _behind(flow, largest)
        node = peak.node.value if isinstance(peak.node, ast.Subscript) and number(peak.node.slice) == 0 else peak.node
        found = flow.operation(node)
        found = flow.operation(found.args[0]) if found is not None and found.name == "values" else found
        if found is None or found.name not in ("max", "amax") or numbers(found.option("dim", 1)) != dim:
            return None
        if not flow.same(Seen(found.args[0], peak.at), data):
            return None
        x, removed = data, removed | through | on_the_way
    return Fused(f"{{F}}.softmax({flow.text(x)}, dim={dim[0]:.0f})", (x,), removed)


def _gelu(flow: Flow, seen: Seen) -> Fused | None:
    """x / 2 * (1 + tanh(...)), x / 2 * (1 + erf(x / sqrt(2))), and x * sigmoid(x)."""
    factors = _factors(flow, seen)
    if not 2 <= len(factors) <= 4:
        return None
    scale = 1.0
    data: list[tuple[Seen, int]] = []
    gates: list[tuple[str, Seen, frozenset[int]]] = []
    removed = frozenset[int]().union(*(t.removed for t, _ in factors))
    for term, sign in factors:
        value = _constant(flow, term.seen)
        if value is not None and value > 0:
            scale *= value**sign
            continue
        gate = _gate(flow, term.seen) if sign == 1 else None
        if gate is not None:
            gates.append(gate)
        else:
            data.append((term.seen, sign))
    if len(data) != 1 or len(gates) != 1 or data[0][1] != 1:
        return None
    x, (kind, inner, more) = data[0][0], gates[0]
    is_it = _is_near(scale, 1.0) if kind == "silu" else _is_near(scale, 0.5)
    if not is_it or not flow.same(x, inner):
        return None
    tail = ', approximate="tanh"' if kind == "tanh" else ""
    name = "silu" if kind == "silu" else "gelu"
    return Fused(f"{{F}}.{name}({flow.text(x)}{tail})", (x,), removed | more)


def _gate(flow: Flow, seen: Seen) -> tuple[str, Seen, frozenset[int]] | None:
    """What multiplies x, by its kind, and of which x it is."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is not None and operation.name == "sigmoid":
        return "silu", Seen(operation.args[0], inner.at), removed
    if operation is None or operation.name != "add" or len(operation.args) != 2:
        return None
    one, other = (Seen(a, inner.at) for a in operation.args)
    if number(one.node) != 1:
        one, other = other, one
    bent = _args(flow, other, "tanh", "erf")
    if number(one.node) != 1 or bent is None or len(bent[0]) != 1:
        return None
    operation = flow.operation(_behind(flow, other).seen.node)
    assert operation is not None
    argument = bent[0][0]
    x = _of_erf(flow, argument) if operation.name == "erf" else _of_tanh(flow, argument)
    return (operation.name, x[0], removed | bent[1] | x[1]) if x is not None else None


def _of_erf(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]] | None:
    scale, rest, removed = _scaled(flow, seen)
    return (rest, removed) if rest is not None and _is_near(scale, 0.5**0.5) else None


def _of_tanh(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]] | None:
    scale, rest, removed = _scaled(flow, seen)
    summed = _args(flow, rest, "add") if rest is not None and _is_near(scale, (2 / math.pi) ** 0.5) else None
    if summed is None:
        return None
    for x, other in (summed[0], summed[0][::-1]):
        powers = _factors(flow, other)
        constants = [(_constant(flow, t.seen), n) for t, n in powers]
        scale = math.prod(c**n for c, n in constants if c is not None)
        rest_of = [t for (t, n), (c, _) in zip(powers, constants, strict=True) if c is None and n == 1]
        more = removed | summed[1] | frozenset[int]().union(*(t.removed for t, _ in powers))
        degree = sum(_degree(flow, t.seen, x) for t in rest_of)
        if abs(scale - _CUBIC) < 1e-6 and degree == 3:
            return x, more
    return None


def _degree(flow: Flow, seen: Seen, x: Seen) -> int:
    """Which power of x this is; 100 for what is none."""
    if flow.same(seen, x):
        return 1
    operation = flow.operation(seen.node)
    if operation is not None and operation.name == "pow" and flow.same(Seen(operation.args[0], seen.at), x):
        power = number(operation.args[1])
        return int(power) if power in (2.0, 3.0) else 100
    return 100


def _scaled(flow: Flow, seen: Seen) -> tuple[float, Seen | None, frozenset[int]]:
    """A constant, and what it multiplies."""
    scale, rest, removed = 1.0, [], frozenset[int]()
    for term, sign in _factors(flow, seen):
        value = _constant(flow, term.seen)
        removed |= term.removed
        if value is not None and value > 0:
            scale *= value**sign
        else:
            rest.append((term.seen, sign))
    return scale, rest[0][0] if len(rest) == 1 and rest[0][1] == 1 else None, removed


def _cross_entropy(flow: Flow, seen: Seen) -> Fused | None:
    """Minus the mean of log-softmax at the targets: gathered, indexed, or by a product with one-hot rows."""
    picked, removed, signs, has_mean = seen, frozenset[int](), 0, False
    while True:
        picked, more = _behind(flow, picked)
        operation = flow.operation(picked.node)
        if operation is None or len(operation.args) != 1:
            break
        if operation.name == "neg":
            signs += 1
        elif operation.name == "mean" and not operation.options and not has_mean:
            has_mean = True
        else:
            break
        removed |= more
        picked = Seen(operation.args[0], picked.at)
        more = frozenset()
    removed |= more
    found = _picked(flow, picked) if has_mean and signs % 2 else None
    if found is None:
        return None
    logits, targets, through = found
    logarithm = _args(flow, logits, "log_softmax")
    if logarithm is None:
        return None
    call, on_the_way = _behind(flow, logits)
    operation = flow.operation(call.node)
    assert operation is not None
    if numbers(operation.option("dim", 1)) not in ((-1.0,), (1.0,)):
        return None
    x = Seen(operation.args[0], call.at)
    written = f"{{F}}.cross_entropy({flow.text(x)}, {flow.text(targets)})"
    return Fused(written, (x, targets), removed | through | on_the_way)


def _picked(flow: Flow, seen: Seen) -> tuple[Seen, Seen, frozenset[int]] | None:
    """Rows of which an element each is picked, the numbers of the elements, and the statements on the way."""
    inner, removed = _behind(flow, seen)
    node = inner.node
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
        rows = flow.operation(flow.value(Seen(node.slice.elts[0], inner.at)) or node.slice.elts[0])
        if rows is not None and rows.name == "arange":
            return Seen(node.value, inner.at), Seen(node.slice.elts[1], inner.at), removed
    operation = flow.operation(node)
    if operation is not None and operation.name == "squeeze":
        inner, more = _behind(flow, Seen(operation.args[0], inner.at))
        operation, removed = flow.operation(inner.node), removed | more
    if operation is not None and operation.name == "gather" and len(operation.args) == 3:
        targets = _rows_of(flow, Seen(operation.args[2], inner.at))
        is_last = numbers(operation.args[1]) in ((-1.0,), (1.0,))
        if targets is None or not is_last:
            return None
        return Seen(operation.args[0], inner.at), targets[0], removed | targets[1]
    return _by_one_hot(flow, inner, removed)


def _rows_of(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]] | None:
    """Targets that were given another dimension at the end."""
    inner, removed = _behind(flow, seen)
    operation = flow.operation(inner.node)
    if operation is not None and operation.name == "unsqueeze" and numbers(operation.args[-1]) in ((-1.0,), (1.0,)):
        return Seen(operation.args[0], inner.at), removed
    if (
        operation is not None
        and operation.name in ("view", "reshape")
        and [number(a) for a in operation.args[1:]] == [-1, 1]
    ):
        return Seen(operation.args[0], inner.at), removed
    return None


def _by_one_hot(flow: Flow, seen: Seen, removed: frozenset[int]) -> tuple[Seen, Seen, frozenset[int]] | None:
    operation = flow.operation(seen.node)
    if operation is None or operation.name != "sum" or numbers(operation.option("dim", 1)) not in ((-1.0,), (1.0,)):
        return None
    factors = _args(flow, Seen(operation.args[0], seen.at), "mul")
    if factors is None:
        return None
    for logits, rows in (factors[0], factors[0][::-1]):
        inner, more = _behind(flow, rows)
        made = flow.operation(inner.node)
        if made is not None and made.name == "one_hot":
            return logits, Seen(made.args[0], inner.at), removed | factors[1] | more
    return None


_FORMULAS: Final[tuple[Callable[[Flow, Seen], Fused | None], ...]] = (_norm, _softmax, _gelu, _cross_entropy)

LEVER = Lever(
    id="memory.fusion",
    title="Torch's own function for a formula",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    edit=edit,
    is_local=True,
)
