"""Attention written out in products and a softmax becomes one fused kernel that never writes the scores to memory.

What        `softmax(q @ k.T * scale + mask) @ v` over the lines of a function becomes `F.scaled_dot_product_attention`.
Guarantee   BOUNDED: the same sums, taken block by block. Random masks (dropout) may be other numbers of the same distribution.
Refuses     Attention whose weights are used for something else; scores that are changed in a way that the kernel does not know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flatout.errors import EditError
from flatout.levers.syntax.attention_masks import Mask, is_very_negative, mask_arguments
from flatout.levers.syntax.flow import Flow, Operation, Seen, functional, is_number, number, numbers, without_casts
from flatout.levers.syntax.imports import without_unused_import
from flatout.levers.syntax.source import offered
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal

_LARGEST: Final = ("amax", "max")


class Product(NamedTuple):
    """A batched product of two tensors; `equation` where it is an einsum."""

    left: Seen
    right: Seen
    name: str
    equation: str


class Scores(NamedTuple):
    """What goes into the softmax: a product, factors with their operator ('mul', 'div'), masks, and the statements of it all."""

    product: Product
    factors: tuple[tuple[str, Seen], ...]
    masks: tuple[Mask, ...]
    removed: frozenset[int]


class Weights(NamedTuple):
    """What the values are multiplied by: a softmax of scores, thinned by dropout."""

    scores: Scores
    dropout: str
    softmax_dim: float
    removed: frozenset[int]


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Wherever attention is written out."""
    yield from offered(LEVER.id, evidence, findings, edit, else_because="no attention writes its scores to memory")


def edit(text: str, parameters: Parameters) -> str:
    """Put scaled_dot_product_attention in place of the lines that lead to the product with the values.

    Raises EditError when they cannot be recognised, or the weights are used besides.
    """
    flow = Flow(text, parameters)
    last, weights, values = _find(flow)
    product = weights.scores.product
    rank = _rank(flow, product, weights.softmax_dim)
    layout = _layout(product, _product(flow, last), rank)
    query, key, factors, removed = _operands(flow, product, weights)
    names = flow.text(query), flow.text(key), flow.text(values)
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
    module, prefix = functional(flow.module)
    given = ", ".join([*tensors, *arguments, *([f"scale={scale}"] if scale else [])])
    new = f"{prefix}.scaled_dot_product_attention({given}){'.squeeze(1)' if is_three else ''}{layout[3]}"
    kept = [query, key, values, *(m.condition for m in weights.scores.masks), *(f for _, f in factors)]
    changed = flow.replaced(last, new, removed=set(removed), kept=kept)
    if module is not flow.module:
        changed, _ = functional(changed)
    return without_unused_import(changed, "math").code


# -- recognising ----------------------------------------------------------------------------------------------------------------


def _find(flow: Flow) -> tuple[Seen, Weights, Seen]:
    """The last product, what leads to it, and the values."""
    for index in range(len(flow.trees)):
        tree = flow.trees[index]
        if isinstance(tree, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(tree):
            product = _product(flow, Seen(node, index)) if isinstance(node, ast.expr) else None
            weights = _weights(flow, product.left) if product is not None else None
            if product is not None and weights is not None and flow.at in {index, *weights.removed}:
                assert isinstance(node, ast.expr)
                return Seen(node, index), weights, product.right
    raise EditError("no product of a softmax of scores with values was recognised around this line")


def _product(flow: Flow, seen: Seen) -> Product | None:
    operation = flow.operation(seen.node)
    if operation is None:
        return None
    args = operation.args
    if operation.name == "einsum" and len(args) == 2 and isinstance(args[1], (ast.List, ast.Tuple)):
        args = (args[0], *args[1].elts)
    if operation.name in ("matmul", "bmm") and len(args) == 2:
        return Product(Seen(args[0], seen.at), Seen(args[1], seen.at), operation.name, "")
    if operation.name == "einsum" and len(args) == 3 and isinstance(args[0], ast.Constant):
        equation = str(args[0].value).replace(" ", "")
        return Product(Seen(args[1], seen.at), Seen(args[2], seen.at), "einsum", equation)
    return None


def _follow(flow: Flow, seen: Seen) -> tuple[Seen, frozenset[int]]:
    """The expression behind a name, and the statements on the way."""
    removed: set[int] = set()
    while True:
        seen = without_casts(flow, seen)
        before = flow.written(seen)
        if before is None:
            return seen, frozenset(removed)
        removed.add(before.at)
        seen = before


def _weights(flow: Flow, seen: Seen) -> Weights | None:
    dropout, removed = "", frozenset[int]()
    while True:
        seen, more = _follow(flow, seen)
        removed |= more
        operation = flow.operation(seen.node)
        if operation is None or not operation.args:
            return None
        inner = Seen(operation.args[0], seen.at)
        if operation.name in ("dropout", "Dropout()") and not dropout:
            dropout = _dropout(flow, operation, seen.at)
            seen = inner
        elif operation.name in ("softmax", "Softmax()"):
            dim = number(operation.option("dim", 1))
            scores = _scores(flow, inner)
            if scores is None or dim not in (-1.0, 2.0, 3.0):
                return None
            return Weights(scores, dropout, dim, removed | scores.removed)
        else:
            return None


def _dropout(flow: Flow, operation: Operation, index: int) -> str:
    """The value of `dropout_p`."""
    if "module" in operation.options:
        owner = flow.text(Seen(operation.options["module"], index))
        return f"{owner}.p if {'self.training' if owner.startswith('self.') else owner + '.training'} else 0.0"
    rate, training = operation.option("p", 1), operation.option("training", 2) or operation.option("train", 2)
    written = flow.text(Seen(rate, index)) if rate is not None else "0.5"
    if training is None or (isinstance(training, ast.Constant) and training.value is True):
        return written
    return f"{written} if {flow.text(Seen(training, index))} else 0.0"


def _scores(flow: Flow, seen: Seen) -> Scores | None:
    """Scores by their last change, and before it again."""
    seen, removed = _follow(flow, seen)
    product = _product(flow, seen)
    if product is not None:
        return Scores(product, (), (), removed)
    if isinstance(seen.node, ast.IfExp):
        found = _if_masked(flow, seen.node, seen.at)
    else:
        operation = flow.operation(seen.node)
        found = _changed(flow, operation, seen.at) if operation is not None else None
    return found._replace(removed=found.removed | removed) if found is not None else None


def _changed(flow: Flow, operation: Operation, index: int) -> Scores | None:
    args = [Seen(a, index) for a in operation.args]
    if operation.name in ("mul", "div") and len(args) == 2:
        for scores, factor in (args, args[::-1]) if operation.name == "mul" else (args,):
            found = _scores(flow, scores)
            if found is not None and all(m.kind != "add" for m in found.masks):
                return found._replace(factors=(*found.factors, (operation.name, factor)))
    if operation.name in ("add", "sub") and len(args) == 2:
        for scores, term in (args, args[::-1]) if operation.name == "add" else (args,):
            found = _scores(flow, scores)
            if found is not None and operation.name == "sub" and _is_largest(flow, term):
                return found
            if found is not None:
                sign = "-" if operation.name == "sub" else ""
                return found._replace(masks=(*found.masks, Mask("add", term, sign=sign)))
    if operation.name == "masked_fill" and len(args) == 3 and is_very_negative(flow, args[2]):
        found = _scores(flow, args[0])
        return found._replace(masks=(*found.masks, Mask("drop", args[1]))) if found is not None else None
    if operation.name == "where" and len(args) == 3:
        is_kept = is_very_negative(flow, args[2])
        found = _scores(flow, args[1] if is_kept else args[2]) if is_kept or is_very_negative(flow, args[1]) else None
        if found is not None:
            return found._replace(masks=(*found.masks, Mask("keep" if is_kept else "drop", args[0])))
    return None


def _is_largest(flow: Flow, seen: Seen) -> bool:
    """Whether this is the largest score of each row, which a softmax takes away itself."""
    node = flow.value(seen) or seen.node
    if isinstance(node, ast.Subscript) and number(node.slice) == 0:
        node = node.value
    operation = flow.operation(node)
    if operation is not None and operation.name == "values":
        operation = flow.operation(operation.args[0])
    return operation is not None and operation.name in _LARGEST and number(operation.option("dim", 1)) == -1


def _if_masked(flow: Flow, node: ast.IfExp, index: int) -> Scores | None:
    """Scores that are masked under a condition."""
    one, other = _scores(flow, Seen(node.body, index)), _scores(flow, Seen(node.orelse, index))
    if one is None or other is None or one.product != other.product or one.factors != other.factors:
        return None
    if len(one.masks) != len(other.masks) + 1 or other.masks != one.masks[:-1] or one.masks[-1].test is not None:
        return None
    mask = one.masks[-1]._replace(test=Seen(node.test, index))
    return one._replace(masks=(*other.masks, mask), removed=one.removed | other.removed)


# -- queries, keys, scale -------------------------------------------------------------------------------------------------------


def _operands(
    flow: Flow, product: Product, weights: Weights
) -> tuple[Seen, Seen, tuple[tuple[str, Seen], ...], frozenset[int]]:
    """Queries and keys without a factor that is written next to them, keys as (..., tokens, size)."""
    query, more = _unscaled(flow, product.left)
    key, also = _unscaled(flow, product.right)
    factors = (*more, *also, *weights.scores.factors)
    if product.name == "einsum":
        return query, key, factors, weights.removed
    turned = _turned(flow, key)
    if turned is not None:
        return query, turned, factors, weights.removed
    before = flow.written(key)
    turned = _turned(flow, before) if before is not None else None
    if before is not None and turned is not None and _is_read_once(flow, key):
        return query, turned, factors, weights.removed | {before.at}
    return query, key._replace(node=_transposed(key.node)), factors, weights.removed


def _transposed(node: ast.expr) -> ast.expr:
    """`node.transpose(-2, -1)`."""
    dims: list[ast.expr] = [ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=n)) for n in (2, 1)]
    return ast.Call(func=ast.Attribute(value=node, attr="transpose", ctx=ast.Load()), args=dims, keywords=[])


def _unscaled(flow: Flow, seen: Seen) -> tuple[Seen, tuple[tuple[str, Seen], ...]]:
    operation = flow.operation(seen.node)
    if operation is not None and operation.name in ("mul", "div") and len(operation.args) == 2:
        tensor, factor = (Seen(a, seen.at) for a in operation.args)
        if operation.name == "mul" and _is_scalar(flow, tensor):
            tensor, factor = factor, tensor
        if _is_scalar(flow, factor):
            return tensor, ((operation.name, factor),)
    return seen, ()


def _is_scalar(flow: Flow, seen: Seen) -> bool:
    """Whether it looks like a number: written out, a root or a power of sizes, an attribute that the class gives a number."""
    operation = flow.operation(seen.node)
    if is_number(seen.node) or (operation is not None and operation.name in ("pow", "sqrt")):
        return True
    value = flow.value(seen)
    return value is not None and not _makes_tensor(flow, value)


def _makes_tensor(flow: Flow, node: ast.expr) -> bool:
    """Whether torch is called to make it, or it is a layer's result."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = [flow.full_name(c.func) for c in calls]
    return any(not n.startswith("math.") and n.startswith("torch") for n in names) or any(
        isinstance(c.func, ast.Attribute) and c.func.attr not in ("size",) and not n
        for c, n in zip(calls, names, strict=True)
    )


def _turned(flow: Flow, seen: Seen) -> Seen | None:
    """The keys as (..., tokens, size) where `seen` is them with these two swapped."""
    operation = flow.operation(seen.node)
    if operation is None or not operation.args:
        return None
    dims = [number(a) for a in operation.args[1:]]
    if len(dims) == 1:
        dims = list(numbers(operation.args[1]))
    is_swap = operation.name in ("transpose", "swapaxes", "swapdims") and set(dims) in ({-2, -1}, {2, 3}, {1, 2})
    is_order = operation.name == "permute" and tuple(dims) in ((0, 1, 3, 2), (0, 2, 1))
    if is_swap or is_order or operation.name == "mT":
        return Seen(operation.args[0], seen.at)
    return None


def _is_read_once(flow: Flow, seen: Seen) -> bool:
    """Whether a name is read nowhere but here."""
    reads = [n for n in ast.walk(flow.scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    assert isinstance(seen.node, ast.Name)
    return sum(n.id == seen.node.id for n in reads) == 1


def _scale(
    flow: Flow, factors: tuple[tuple[str, Seen], ...], tensors: tuple[Seen, Seen], query: str
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


def _root(flow: Flow, seen: Seen) -> Seen | None:
    """What a square root is taken of."""
    operation = flow.operation(seen.node)
    if (
        operation is None
        and isinstance(seen.node, ast.Call)
        and flow.full_name(seen.node.func) in ("math.sqrt", "numpy.sqrt")
    ):
        return Seen(seen.node.args[0], seen.at)
    if operation is not None and operation.name == "sqrt":
        inner = seen._replace(node=operation.args[0])
        made = flow.operation(inner.node)
        is_made = made is not None and made.name in ("tensor", "FloatTensor", "as_tensor")
        return inner._replace(node=made.args[0]) if is_made and made is not None else inner
    if operation is not None and operation.name == "pow" and number(operation.args[1]) == 0.5:
        return seen._replace(node=operation.args[0])
    return None


def _is_usual(flow: Flow, kind: str, factor: Seen, tensors: tuple[Seen, Seen]) -> bool:
    """Whether the factor is one over the root of the size of queries and keys."""
    before = flow.written(factor) or factor
    size: Seen | None = None
    operation = flow.operation(before.node)
    if kind == "div":
        size = _root(flow, before)
    elif operation is not None and operation.name == "pow" and number(operation.args[1]) == -0.5:
        size = before._replace(node=operation.args[0])
    elif operation is not None and operation.name == "div" and number(operation.args[0]) == 1:
        size = _root(flow, before._replace(node=operation.args[1]))
    elif operation is not None and operation.name == "rsqrt":
        size = before._replace(node=operation.args[0])
    return size is not None and _is_size_of(flow, size, tensors)


def _is_size_of(flow: Flow, seen: Seen, tensors: tuple[Seen, Seen]) -> bool:
    """Whether this is the last size of the queries or the keys, as they are when they are multiplied."""
    seen = flow.written(seen) or seen
    operation = flow.operation(seen.node)
    node = seen.node
    if operation is not None and operation.name == "size" and number(operation.option("dim", 1)) in (-1, 3):
        owner = operation.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        if number(node.slice) not in (-1, 3):
            return False
        owner = node.value.value
    else:
        return False
    return any(flow.same(Seen(owner, seen.at), t) for t in tensors)


# -- layouts --------------------------------------------------------------------------------------------------------------------


def _rank(flow: Flow, product: Product, softmax_dim: float) -> int | None:
    """How many dimensions queries have: 3, 4, or None where that cannot be seen."""
    if product.name == "bmm":
        return 3
    if product.name == "einsum":
        letters = product.equation.partition("->")[2]
        return None if "." in letters else len(letters)
    if softmax_dim > 0:
        return int(softmax_dim) + 1
    turned = flow.operation(product.right.node)
    dims = {number(a) for a in turned.args[1:]} if turned is not None and turned.name == "transpose" else set()
    return 3 if dims == {1.0, 2.0} else _dimensions(flow, product.left, 8)


def _dimensions(flow: Flow, seen: Seen, depth: int) -> int | None:
    """The number of dimensions of a tensor, by how it was made."""
    before = flow.written(seen)
    if before is not None and depth:
        return _dimensions(flow, before, depth - 1)
    if isinstance(seen.node, ast.Name):
        return _unpacked(flow, seen.node.id)
    operation = flow.operation(seen.node)
    if operation is not None and operation.name in ("view", "reshape"):
        sizes = operation.args[1:]
        return len(sizes) if len(sizes) > 1 else None
    if operation is not None and operation.name in ("transpose", "contiguous", "mul", "div", "permute"):
        return _dimensions(flow, Seen(operation.args[0], seen.at), depth)
    if isinstance(seen.node, ast.Call) and len(seen.node.args) == 1:
        made = flow.attribute(seen.node.func)
        if isinstance(made, ast.Call) and flow.full_name(made.func) == "torch.nn.Linear":
            return _dimensions(flow, Seen(seen.node.args[0], seen.at), depth)
    return None


def _unpacked(flow: Flow, name: str) -> int | None:
    """How many names the shape of a tensor is unpacked into."""
    for node in ast.walk(flow.scope):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        if ast.unparse(node.value) in (f"{name}.shape", f"{name}.size()"):
            return len(node.targets[0].elts)
    return None


def _layout(product: Product, last: Product | None, rank: int | None) -> tuple[str, str, str, str]:
    """Calls that bring queries, keys and values to (batch..., tokens, size), and the result to where it was wanted."""
    assert last is not None
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
    """In parentheses unless it binds closely enough for a method call."""
    node = ast.parse(text.strip(), mode="eval").body
    is_close = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return text if is_close else f"({text})"


LEVER = Lever(
    id="memory.fused-attention",
    title="Fused attention",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    edit=edit,
    is_local=True,
)
