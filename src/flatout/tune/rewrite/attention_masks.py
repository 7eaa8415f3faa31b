"""Masks of attention scores as they are written by hand, as arguments of scaled_dot_product_attention."""

from __future__ import annotations

import ast
from typing import Final, Literal, NamedTuple

from flatout.core.errors import EditError
from flatout.tune.rewrite.flow import Expression, Flow, written_number
from flatout.tune.rewrite.source import word_set

Shape = Literal["lower", "upper", "minus-infinite upper"]
"""What a square of the file is: ones on and below the diagonal, ones above it, or minus infinity above it and zeros else."""

_LOW: Final = -1e4
"""Scores below this weigh nothing after a softmax in any precision; hand-written masks begin at -1e4 (half precision's)."""


class ScoreMask(NamedTuple):
    """A change of attention scores: very low where `condition` ('drop') or where not ('keep'), or `condition` added
    ('add').
    """

    kind: Literal["drop", "keep", "add"]
    condition: Expression
    test: Expression | None = None
    """What it is done under, if it is not always done."""
    sign: str = ""


def is_very_negative(flow: Flow, expr: Expression, depth: int = 4) -> bool:
    """Whether a value is minus infinity or as good as that."""
    node = flow.value(expr) or expr.node
    value = written_number(node)
    if value is not None:
        return value <= _LOW
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        written = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        try:
            return float(written) <= _LOW if isinstance(written, (str, int, float)) else False
        except ValueError:
            return False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return flow.full_name(node.operand) in ("math.inf", "torch.inf", "numpy.inf") or _is_infinite(node.operand)
    if isinstance(node, ast.Attribute) and node.attr == "min" and isinstance(node.value, ast.Call):
        return flow.full_name(node.value.func) == "torch.finfo"
    operation = flow.operation(node)
    if depth and operation is not None and operation.name in ("tensor", "full", "full_like", "new_tensor", "to"):
        return any(is_very_negative(flow, Expression(a, expr.at), depth - 1) for a in operation.args)
    return False


def _is_infinite(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float"
    return is_call and "inf" in ast.unparse(node).lower()


def mask_arguments(flow: Flow, masks: tuple[ScoreMask, ...]) -> list[str]:
    """Arguments of the kernel for these masks: none, `is_causal` or `attn_mask`.

    Raises EditError for masks that cannot be put together.
    """
    if not masks:
        return []
    if len(masks) == 1:
        return _argument(flow, masks[0])
    if any(m.test is not None for m in masks):
        raise EditError("one of several masks is there on a condition")
    conditions = [m for m in masks if m.kind != "add"]
    terms = [m for m in masks if m.kind == "add"]
    added = " + ".join(_text(flow, m) for m in terms)
    if not terms:
        return [f"attn_mask={' & '.join(_close(_allowed_mask(flow, m)) for m in conditions)}"]
    if not conditions:
        return [f"attn_mask={added}"]
    dropped = [_dropped(flow, m) for m in conditions]
    where = dropped[0] if len(dropped) == 1 else " | ".join(map(_close, dropped))
    return [f'attn_mask={_close(added)}.masked_fill({where}, float("-inf"))']


def _argument(flow: Flow, mask: ScoreMask) -> list[str]:
    is_triangle = _is_causal(flow, mask)
    if mask.test is None:
        return ["is_causal=True"] if is_triangle else [f"attn_mask={_text(flow, mask)}"]
    test = flow.text(mask.test)
    if is_triangle and isinstance(mask.test.node, (ast.Name, ast.Attribute)) and mask.kind != "add":
        return [f"is_causal={test}"]
    written, node = _text(flow, mask), mask.test.node
    name = ast.unparse(node.left) if isinstance(node, ast.Compare) and len(node.ops) == 1 else ""
    if test == f"{name} is not None" and written == name:
        return [f"attn_mask={name}"]
    if test == f"{name} is not None":
        return [f"attn_mask=None if {name} is None else {written}"]
    return [f"attn_mask={written} if {test} else None"]


def _text(flow: Flow, mask: ScoreMask) -> str:
    if mask.kind == "add":
        return f"{mask.sign}{_close(flow.text(mask.condition)) if mask.sign else flow.text(mask.condition)}"
    return _allowed_mask(flow, mask)


def _allowed_mask(flow: Flow, mask: ScoreMask) -> str:
    """Where scores stay, as a condition."""
    condition = mask.condition
    operation = flow.operation(condition.node)
    if mask.kind == "keep":
        return flow.text(condition)
    if operation is not None and operation.name == "logical_not":
        return flow.text(Expression(operation.args[0], condition.at))
    if operation is not None and operation.name in ("eq", "ne") and len(operation.args) == 2:
        one, other = (flow.text(Expression(a, condition.at)) for a in operation.args)
        return f"{one} {'!=' if operation.name == 'eq' else '=='} {other}"
    return _inverse(flow.text(condition))


def _dropped(flow: Flow, mask: ScoreMask) -> str:
    """Where scores are set very low, as a condition."""
    written = flow.text(mask.condition)
    return written if mask.kind == "drop" else _inverse(written)


def _inverse(text: str) -> str:
    return text[1:] if text.startswith("~") and _close(text[1:]) == text[1:] else f"~{_close(text)}"


def _close(text: str) -> str:
    node = ast.parse(text, mode="eval").body
    is_closed = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if is_closed or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)) else f"({text})"


def _is_causal(flow: Flow, mask: ScoreMask) -> bool:
    """Whether a query sees the keys up to its own place and no others, and queries and keys are as many."""
    shape = _shape(flow, mask.condition, 12)
    return (mask.kind, shape) in (("drop", "upper"), ("keep", "lower"), ("add", "minus-infinite upper"))


_SAME: Final = word_set(
    "to bool float byte type unsqueeze contiguous view reshape expand type_as requires_grad_ detach cuda"
)


def _shape(flow: Flow, expr: Expression, depth: int) -> Shape | None:
    """The triangle that an expression is, followed through names, buffers, slices and views."""
    node = expr.node
    if not depth:
        return None
    if isinstance(node, ast.Subscript):
        return _shape(flow, Expression(node.value, expr.at), depth - 1) if _is_square(node.slice) else None
    if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(getattr(node, "ctx", None), ast.Store):
        value = flow.value(expr)
        return _shape(flow, Expression(value, _index_of(flow, expr)), depth - 1) if value is not None else None
    operation = flow.operation(node)
    if operation is None or not operation.args:
        return None
    inner = Expression(operation.args[0], expr.at)
    if operation.name in ("tril", "triu"):
        return _triangle(flow, operation.name, inner, operation.option("diagonal", 1))
    if operation.name in ("eq", "ne", "gt") and len(operation.args) == 2:
        against = operation.args[1]
        is_zero = written_number(against) == 0 or (isinstance(against, ast.Constant) and against.value is False)
        is_one = written_number(against) == 1 or (isinstance(against, ast.Constant) and against.value is True)
        is_same = (operation.name in ("ne", "gt") and is_zero) or (operation.name == "eq" and is_one)
        is_inverted = (operation.name == "eq" and is_zero) or (operation.name == "ne" and is_one)
        shape = _shape(flow, inner, depth - 1) if is_same or is_inverted else None
        return _opposite(shape) if is_inverted else shape
    if operation.name == "logical_not":
        return _opposite(_shape(flow, inner, depth - 1))
    if operation.name == "sub" and written_number(operation.args[0]) == 1:
        return _opposite(_shape(flow, Expression(operation.args[1], expr.at), depth - 1))
    if operation.name == "masked_fill" and len(operation.args) == 3:
        where = _shape(flow, Expression(operation.args[1], expr.at), depth - 1)
        start = flow.operation(operation.args[0])
        is_low = is_very_negative(flow, Expression(operation.args[2], expr.at))
        is_zero = start is not None and start.name in ("zeros", "zeros_like")
        return "minus-infinite upper" if where == "upper" and is_low and is_zero else None
    if operation.name in _SAME:
        return _shape(flow, inner, depth - 1)
    return None


def _opposite(shape: Shape | None) -> Shape | None:
    return "upper" if shape == "lower" else "lower" if shape == "upper" else None


def _triangle(flow: Flow, name: str, inner: Expression, diagonal: ast.expr | None) -> Shape | None:
    """What is cut out of a square of ones, or of minus infinity."""
    offset = 0.0 if diagonal is None else written_number(diagonal)
    constructor = flow.operation(flow.value(inner) or inner.node)
    if constructor is None or not _has_equal_sides(constructor.args):
        return None
    if constructor.name == "full" and len(constructor.args) > 1:
        value = constructor.args[1]
        if is_very_negative(flow, Expression(value, inner.at)):
            return "minus-infinite upper" if name == "triu" and offset == 1 else None
        if not isinstance(value, ast.Constant) or value.value not in (1, True):
            return None
    elif constructor.name not in ("ones", "ones_like"):
        return None
    return "lower" if name == "tril" and offset == 0 else "upper" if name == "triu" and offset == 1 else None


def _has_equal_sides(args: tuple[ast.expr, ...]) -> bool:
    sizes = list(args[0].elts) if args and isinstance(args[0], (ast.Tuple, ast.List)) else list(args)
    if sizes and not isinstance(args[0], (ast.Tuple, ast.List)):
        sizes = sizes[:4]
    return len(sizes) >= 2 and ast.dump(sizes[-1]) == ast.dump(sizes[-2])


def _is_square(index: ast.expr) -> bool:
    """Whether an index leaves a square: the last two parts are the same `:n`, the others None or whole."""
    parts = list(index.elts) if isinstance(index, ast.Tuple) else [index]
    slices = [p for p in parts if isinstance(p, ast.Slice)]
    if any(
        not isinstance(p, ast.Slice) and not (isinstance(p, ast.Constant) and p.value in (None, Ellipsis))
        for p in parts
    ):
        return False
    if not slices or all(s.lower is None and s.upper is None and s.step is None for s in slices):
        return True
    last = slices[-2:]
    same = len(last) == 2 and ast.dump(last[0]) == ast.dump(last[1]) and last[0].upper is not None
    return same and all(s.lower is None and s.step is None for s in slices) and isinstance(parts[-2], ast.Slice)


def _index_of(flow: Flow, expr: Expression) -> int:
    before = flow.written(expr)
    return before.at if before is not None else expr.at
