"""Attention written out in products and a softmax becomes one fused kernel that never writes the scores to memory.

What        `softmax(q @ k.T * scale + mask) @ v` over the lines of a function becomes `F.scaled_dot_product_attention`.
Guarantee   BOUNDED: the same sums, taken block by block. Random masks (dropout) may be other numbers of the same distribution.
Refuses     Attention whose weights are used for something else; scores that are changed in a way that the kernel does not know.
"""

from __future__ import annotations

import ast
from functools import partial
from itertools import permutations
from typing import Literal, NamedTuple

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.attention_masks import ScoreMask, is_very_negative, mask_arguments
from flatout.tune.rewrite.flow import Expression, Flow, is_written_number, written_number, written_numbers
from flatout.tune.rewrite.formulas import FormulaReading, NotThisFormula, Operands, row_maximum, with_functional
from flatout.tune.rewrite.imports import without_unused_import


class BatchedProduct(NamedTuple):
    """A batched product of two tensors; `equation` where it is an einsum."""

    left: Expression
    right: Expression
    name: str
    equation: str


class Scores(NamedTuple):
    """The input of the softmax: a product, factors with their operator ('mul', 'div'), and masks."""

    product: BatchedProduct
    factors: tuple[tuple[str, Expression], ...] = ()
    masks: tuple[ScoreMask, ...] = ()

    def masked(self, mask: ScoreMask) -> Scores:
        """The scores with one mask more."""
        return self._replace(masks=(*self.masks, mask))


class AttentionWeights(NamedTuple):
    """The left operand of the product with the values: a softmax of scores, thinned by dropout."""

    scores: Scores
    dropout: str
    softmax_dim: float


def edit(text: str, parameters: Parameters) -> str:
    """Put scaled_dot_product_attention in place of the lines that lead to the product with the values.

    Raises EditError when they cannot be recognised, or the weights are used besides.
    """
    flow = Flow(text, parameters)
    reading, last, weights = _find(flow)
    product, applied = weights.scores.product, _product(reading, last)
    rank = _rank(flow, product, weights.softmax_dim)
    layout = _layout(product, applied)
    query, key, factors = _operands(reading, product, weights)
    names = flow.text(query), flow.text(key), flow.text(applied.right)
    scale, names_q = _scale(flow, factors, (query, key), names[0])
    arguments = mask_arguments(flow, weights.scores.masks)
    is_three = rank == 3 and not any(a.startswith("attn_mask") for a in arguments)
    tail = ".unsqueeze(1)" if is_three else ""
    tensors = [
        f"{_atom(name) if how + tail else name}{how}{tail}"
        for name, how in zip((names_q, names[1], names[2]), layout[:3], strict=True)
    ]
    if weights.dropout:
        arguments = [*arguments, f"dropout_p={weights.dropout}"]
    sdpa_args = ", ".join([*tensors, *arguments, *([f"scale={scale}"] if scale else [])])
    new = f"{{F}}.scaled_dot_product_attention({sdpa_args}){'.squeeze(1)' if is_three else ''}{layout[3]}"
    reused = [query, key, applied.right, *(m.condition for m in weights.scores.masks), *(f for _, f in factors)]
    return without_unused_import(with_functional(reading, last, new, reused=reused), "math").code


# -- recognising ----------------------------------------------------------------------------------------------------------------


def _find(flow: Flow) -> tuple[FormulaReading, Expression, AttentionWeights]:
    """The last product, and what leads to it."""
    for last in flow.expressions():
        reading = FormulaReading(flow)
        try:
            weights = _weights(reading, _product(reading, last).left)
            reading.check(flow.at in {last.at, *reading.removed})
        except NotThisFormula:
            continue
        return reading, last, weights
    raise EditError("no product of a softmax of scores with values was recognised around this line")


def _product(reading: FormulaReading, expr: Expression) -> BatchedProduct:
    found = reading.here(expr, "matmul", "bmm", "einsum")
    args, equation = found.args, ""
    if found.name == "einsum":
        form, *args_ = args
        if len(args_) == 1 and isinstance(args_[0].node, (ast.List, ast.Tuple)):
            args_ = [Expression(node, expr.at) for node in args_[0].node.elts]
        args, equation = tuple(args_), _equation(reading, form.node)
    reading.check(len(args) == 2)
    return BatchedProduct(args[0], args[1], found.name, equation)


def _equation(reading: FormulaReading, node: ast.expr) -> str:
    """The text of an einsum's equation, which may be an f-string that has nothing to fill in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    reading.check(len(texts) == len(parts))
    return "".join(texts).replace(" ", "")


def _weights(reading: FormulaReading, expr: Expression) -> AttentionWeights:
    dropout = ""
    while (found := reading.operation(expr)).name in ("dropout", "Dropout()") and not dropout:
        dropout, expr = _dropout(reading.flow, found), found.args[0]
    reading.check(found.name in ("softmax", "Softmax()") and found.dims in ((-1.0,), (2.0,), (3.0,)))
    return AttentionWeights(_scores(reading, found.args[0]), dropout, found.dims[0])


def _dropout(flow: Flow, operation: Operands) -> str:
    """The value of `dropout_p` as text, 0.0 where there is no dropout."""
    index = operation.args[0].at
    if "module" in operation.options:
        owner = flow.text(Expression(operation.options["module"], index))
        return f"{owner}.p if {'self.training' if owner.startswith('self.') else owner + '.training'} else 0.0"
    rate, training = operation.option("p", 1), operation.option("training", 2) or operation.option("train", 2)
    written = flow.text(Expression(rate, index)) if rate is not None else "0.5"
    if training is None or (isinstance(training, ast.Constant) and training.value is True):
        return written
    return f"{written} if {flow.text(Expression(training, index))} else 0.0"


def _scores(reading: FormulaReading, expr: Expression) -> Scores:
    """Scores by their last change, and before it again."""
    expr = reading.behind(expr)
    conditional = reading.flow.written(expr)
    if conditional is not None:
        reading.removed.add(conditional.at)
        return _if_masked(reading, conditional)
    if isinstance(expr.node, ast.IfExp):
        return _if_masked(reading, expr)
    found = reading.here(expr)
    if found.name in ("matmul", "bmm", "einsum"):
        return Scores(_product(reading, expr))
    args = found.args
    if found.name in ("mul", "div", "add", "sub") and len(args) == 2:
        orders = permutations(args) if found.name in ("mul", "add") else [args]
        return reading.first(partial(_changed, name=found.name, scores=a, other=b) for a, b in orders)
    reading.check(found.name in ("masked_fill", "where") and len(args) == 3)
    inner, condition, value = args if found.name == "masked_fill" else (args[2], args[0], args[1])
    kind: Literal["drop", "keep"] = "drop"
    if found.name == "where" and is_very_negative(reading.flow, inner):
        inner, value, kind = value, inner, "keep"
    reading.check(is_very_negative(reading.flow, value))
    return _scores(reading, inner).masked(ScoreMask(kind, condition))


def _changed(reading: FormulaReading, *, name: str, scores: Expression, other: Expression) -> Scores:
    """Scores that are multiplied by a factor, or to which a mask is added."""
    found = _scores(reading, scores)
    if name in ("mul", "div"):
        reading.check(all(m.kind != "add" for m in found.masks))
        return found._replace(factors=(*found.factors, (name, other)))
    if name == "sub" and _is_largest(reading.flow, other):
        return found
    return found.masked(ScoreMask("add", other, sign="-" if name == "sub" else ""))


def _is_largest(flow: Flow, expr: Expression) -> bool:
    """Whether this is the largest score of each row, which a softmax takes away itself."""
    operation = row_maximum(flow, flow.value(expr) or expr.node)
    return operation is not None and written_number(operation.option("dim", 1)) == -1


def _if_masked(reading: FormulaReading, expr: Expression) -> Scores:
    """Scores that are masked under a condition."""
    assert isinstance(expr.node, ast.IfExp)
    test, body, orelse = (Expression(n, expr.at) for n in (expr.node.test, expr.node.body, expr.node.orelse))
    one, other = _scores(reading, body), _scores(reading, orelse)
    reading.check(one[:2] == other[:2] and len(one.masks) == len(other.masks) + 1)
    reading.check(other.masks == one.masks[:-1] and one.masks[-1].test is None)
    return other.masked(one.masks[-1]._replace(test=test))


# -- queries, keys, scale -------------------------------------------------------------------------------------------------------


def _operands(
    reading: FormulaReading, product: BatchedProduct, weights: AttentionWeights
) -> tuple[Expression, Expression, tuple[tuple[str, Expression], ...]]:
    """Queries and keys without a factor that is written next to them, keys as (..., tokens, size)."""
    flow = reading.flow
    query, more = _unscaled(flow, product.left)
    key, also = _unscaled(flow, product.right)
    factors = (*more, *also, *weights.scores.factors)
    if product.name == "einsum":
        return query, key, factors
    transposed = _untransposed(flow, key)
    before = flow.written(key)
    if transposed is None and before is not None and _is_read_once(flow, key):
        transposed = _untransposed(flow, before)
        reading.removed |= {before.at} if transposed is not None else set()
    return query, transposed or key._replace(node=_transposed(key.node)), factors


def _transposed(node: ast.expr) -> ast.expr:
    """The expression `node.transpose(-2, -1)`, the last two dimensions swapped."""
    dims: list[ast.expr] = [ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=n)) for n in (2, 1)]
    return ast.Call(func=ast.Attribute(value=node, attr="transpose", ctx=ast.Load()), args=dims, keywords=[])


def _unscaled(flow: Flow, expr: Expression) -> tuple[Expression, tuple[tuple[str, Expression], ...]]:
    operation = flow.operation(expr.node)
    if operation is not None and operation.name in ("mul", "div") and len(operation.args) == 2:
        tensor, factor = (Expression(a, expr.at) for a in operation.args)
        if operation.name == "mul" and _is_scalar(flow, tensor):
            tensor, factor = factor, tensor
        if _is_scalar(flow, factor):
            return tensor, ((operation.name, factor),)
    return expr, ()


def _is_scalar(flow: Flow, expr: Expression) -> bool:
    """Whether it looks like a number: written out, a root or a power of sizes, an attribute that the class gives a number."""
    operation = flow.operation(expr.node)
    if is_written_number(expr.node) or (operation is not None and operation.name in ("pow", "sqrt")):
        return True
    value = flow.value(expr)
    return value is not None and not _makes_tensor(flow, value)


def _makes_tensor(flow: Flow, node: ast.expr) -> bool:
    """Whether torch is called to make it, or it is a layer's result."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = [flow.full_name(c.func) for c in calls]
    return any(not n.startswith("math.") and n.startswith("torch") for n in names) or any(
        isinstance(c.func, ast.Attribute) and c.func.attr not in ("size",) and not n
        for c, n in zip(calls, names, strict=True)
    )


def _untransposed(flow: Flow, expr: Expression) -> Expression | None:
    """The keys as (..., tokens, size) where `expr` is them with these two swapped."""
    operation = flow.operation(expr.node)
    if operation is None or not operation.args:
        return None
    dims = [written_number(a) for a in operation.args[1:]]
    if len(dims) == 1:
        dims = list(written_numbers(operation.args[1]))
    is_swap = operation.name in ("transpose", "swapaxes", "swapdims") and set(dims) in ({-2, -1}, {2, 3}, {1, 2})
    is_order = operation.name == "permute" and tuple(dims) in ((0, 1, 3, 2), (0, 2, 1))
    if is_swap or is_order or operation.name == "mT":
        return Expression(operation.args[0], expr.at)
    return None


def _is_read_once(flow: Flow, expr: Expression) -> bool:
    """Whether a name is read nowhere but here."""
    reads = [n for n in ast.walk(flow.scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    assert isinstance(expr.node, ast.Name)
    return sum(n.id == expr.node.id for n in reads) == 1


def _scale(
    flow: Flow, factors: tuple[tuple[str, Expression], ...], tensors: tuple[Expression, Expression], query: str
) -> tuple[str, str]:
    """The value of `scale`, '' where it is the usual one; and the queries, multiplied by a factor that may be no number."""
    if not factors:
        return "1.0", query
    if len(factors) == 1 and _is_usual(flow, *factors[0], tensors):
        return "", query
    written = ""
    for kind, factor in factors:
        value = flow.value(factor)
        if value is not None and _makes_tensor(flow, value):
            query = f"{_atom(query)} {'*' if kind == 'mul' else '/'} {_atom(flow.text(factor))}"
            continue
        text = flow.text(factor)
        if kind == "div":
            root = _root(flow, factor)
            text = f"{_atom(flow.text(root))}**-0.5" if root is not None else f"1.0 / {_atom(text)}"
        written = f"{_atom(written)} * {_atom(text)}" if written else text
    return written or "1.0", query


def _root(flow: Flow, expr: Expression) -> Expression | None:
    """What a square root is taken of."""
    operation = flow.operation(expr.node)
    if (
        operation is None
        and isinstance(expr.node, ast.Call)
        and flow.full_name(expr.node.func) in ("math.sqrt", "numpy.sqrt")
    ):
        return Expression(expr.node.args[0], expr.at)
    if operation is not None and operation.name == "sqrt":
        inner = expr._replace(node=operation.args[0])
        constructor = flow.operation(inner.node)
        is_constructor = constructor is not None and constructor.name in ("tensor", "FloatTensor", "as_tensor")
        return inner._replace(node=constructor.args[0]) if is_constructor and constructor is not None else inner
    if operation is not None and operation.name == "pow" and written_number(operation.args[1]) == 0.5:
        return expr._replace(node=operation.args[0])
    return None


def _is_usual(flow: Flow, kind: str, factor: Expression, tensors: tuple[Expression, Expression]) -> bool:
    """Whether the factor is one over the root of the size of queries and keys."""
    before = flow.written(factor) or factor
    size: Expression | None = None
    operation = flow.operation(before.node)
    if kind == "div":
        size = _root(flow, before)
    elif operation is not None and operation.name == "pow" and written_number(operation.args[1]) == -0.5:
        size = before._replace(node=operation.args[0])
    elif operation is not None and operation.name == "div" and written_number(operation.args[0]) == 1:
        size = _root(flow, before._replace(node=operation.args[1]))
    elif operation is not None and operation.name == "rsqrt":
        size = before._replace(node=operation.args[0])
    return size is not None and _is_size_of(flow, size, tensors)


def _is_size_of(flow: Flow, expr: Expression, tensors: tuple[Expression, Expression]) -> bool:
    """Whether this is the last size of the queries or the keys, as they are when they are multiplied."""
    expr = flow.written(expr) or expr
    operation = flow.operation(expr.node)
    node = expr.node
    if operation is not None and operation.name == "size" and written_number(operation.option("dim", 1)) in (-1, 3):
        owner = operation.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        if written_number(node.slice) not in (-1, 3):
            return False
        owner = node.value.value
    else:
        return False
    return any(flow.same(Expression(owner, expr.at), t) for t in tensors)


# -- layouts --------------------------------------------------------------------------------------------------------------------


def _rank(flow: Flow, product: BatchedProduct, softmax_dim: float) -> int | None:
    """How many dimensions queries have: 3, 4, or None where that cannot be seen."""
    if product.name == "bmm":
        return 3
    if product.name == "einsum":
        letters = product.equation.partition("->")[2]
        return None if "." in letters else len(letters)
    if softmax_dim > 0:
        return int(softmax_dim) + 1
    transposed = flow.operation(product.right.node)
    dims = (
        {written_number(a) for a in transposed.args[1:]}
        if transposed is not None and transposed.name == "transpose"
        else set()
    )
    return 3 if dims == {1.0, 2.0} else _dimensions(flow, product.left, 8)


def _dimensions(flow: Flow, expr: Expression, depth: int) -> int | None:
    """The number of dimensions of a tensor, by how it was made."""
    before = flow.written(expr)
    if before is not None and depth:
        return _dimensions(flow, before, depth - 1)
    if isinstance(expr.node, ast.Name):
        return _unpacked(flow, expr.node.id)
    operation = flow.operation(expr.node)
    if operation is not None and operation.name in ("view", "reshape"):
        sizes = operation.args[1:]
        return len(sizes) if len(sizes) > 1 else None
    if operation is not None and operation.name in ("transpose", "contiguous", "mul", "div", "permute"):
        return _dimensions(flow, Expression(operation.args[0], expr.at), depth)
    if isinstance(expr.node, ast.Call) and flow.linear(expr.node) is not None:
        return _dimensions(flow, Expression(expr.node.args[0], expr.at), depth)
    return None


def _unpacked(flow: Flow, name: str) -> int | None:
    """How many names the shape of a tensor is unpacked into."""
    for node in ast.walk(flow.scope):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        if ast.unparse(node.value) in (f"{name}.shape", f"{name}.size()"):
            return len(node.targets[0].elts)
    return None


def _layout(product: BatchedProduct, last: BatchedProduct) -> tuple[str, str, str, str]:
    """Calls that bring queries, keys and values to (batch..., tokens, size), and the result to where it was wanted."""
    q = k = v = out = ""
    scores = ""
    if product.name == "einsum":
        inputs, _, scores = product.equation.partition("->")
        left, right = inputs.split(",")
        if "." in product.equation:
            scores = _plain(product.equation, ("...qd,...kd->...qk",))
        else:
            size = set(left) & set(right) - set(scores)
            batch, query, keys = scores[:-2], scores[-2:-1], scores[-1:]
            if len(size) != 1 or set(left) != {*batch, query, *size} or set(right) != {*batch, keys, *size}:
                raise EditError(f"'{product.equation}' is no product of queries and keys that a kernel knows")
            q, k = _moved(left, batch + query + "".join(size)), _moved(right, batch + keys + "".join(size))
    if last.name == "einsum":
        inputs, _, result = last.equation.partition("->")
        left, right = inputs.split(",")
        if "." in last.equation:
            _plain(last.equation, ("...qk,...kd->...qd",))
        else:
            batch, query, keys = left[:-2], left[-2:-1], left[-1:]
            size = set(right) - set(left)
            if len(size) != 1 or set(right) != {*batch, keys, *size} or set(result) != {*batch, query, *size}:
                raise EditError(f"'{last.equation}' is no product of weights and values that a kernel knows")
            v = _moved(right, batch + keys + "".join(size))
            out = _moved(batch + query + "".join(size), result)
    return q, k, v, out


def _plain(equation: str, known: tuple[str, ...]) -> str:
    """An equation with '...', told by its letters' pattern.

    Raises EditError for others.
    """
    letters = dict.fromkeys(c for c in equation if c.isalpha())
    for form in known:
        names = dict.fromkeys(c for c in form if c.isalpha())
        if (
            len(letters) == len(names)
            and equation.translate({ord(a): b for a, b in zip(letters, names, strict=True)}) == form
        ):
            return "...qk"
    raise EditError(f"'{equation}' is not read")


def _moved(here: str, there: str) -> str:
    """The call that brings dimensions named by letters from one order to another."""
    order = [here.index(c) for c in there]
    moved = [i for i, n in enumerate(order) if i != n]
    if not moved:
        return ""
    if len(moved) == 2:
        return f".transpose({moved[0]}, {moved[1]})"
    return f".permute({', '.join(map(str, order))})"


def _atom(text: str) -> str:
    """The text in parentheses, unless it binds closely enough for a method call."""
    node = ast.parse(text.strip(), mode="eval").body
    is_close = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return text if is_close else f"({text})"


LEVER = source_lever(
    __name__,
    edit,
    title="Fused attention",
    else_because="no attention writes its scores to memory",
)
