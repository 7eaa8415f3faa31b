"""Attention in compiled code by one fused kernel, where a script or a library writes it out in products and a softmax.

A script's own lines are rewritten by `memory.fused-attention`; those of an installed package are not ours to edit. Of the graph
that torch.compile makes of both, `softmax(q @ k.T * scale) @ v` becomes `F.scaled_dot_product_attention`. Inductor has patterns
of its own for that; they know `torch.matmul`, and no `torch.einsum`.
"""

# B batch, H heads, T queries, S keys, D width of a head

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from numbers import Real
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from flatout.core.records.evidence import Evidence
from flatout.machine.cost.accounting import operator_seconds
from flatout.tune.levers.graph_passes import called_name, change_graphs, changes_first, fake_result, first_argument

_HALF: Final = (torch.bfloat16, torch.float16)
_WIDEST: Final = 256
"""The width of a head up to which FlashAttention's kernels run."""
_OLDEST: Final = (8, 0)
"""The compute capability from which these run."""
_SHORTEST: Final = 32
_SMALL_PART: Final = 0.002
_BATCHED: Final = ("aten.bmm", "aten.baddbmm")
_MASKS: Final = ("aten.masked_fill", "aten.masked_fill_", "aten.where", "aten.add", "aten.add_", "aten.native_dropout")
_SCORES: Final = ("bid,bjd->bij", "bhid,bhjd->bhij")
_VALUES: Final = ("bij,bjd->bid", "bhij,bhjd->bhid")
_PRODUCTS: Final = ("matmul", "bmm", "__matmul__")
_CASTS: Final = ("to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "clone", "detach")
_MOVES: Final = ("transpose", "permute", "squeeze", "unsqueeze", "swapaxes", "movedim")


class _SoftmaxOfProducts(NamedTuple):
    query: Node
    key: Node
    value: Node
    scale: float
    is_transposed: bool
    """Whether the key is (..., D, S)."""
    calls: tuple[Node, ...]
    """What the kernel replaces besides, from the product with the values inwards."""


def writes_attention_out(evidence: Evidence) -> bool:
    """Whether attention without a mask that takes some of a step is computed by products and a softmax."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for o in evidence.operators:
        if o.outputs:
            shapes.setdefault(o.op, set()).add(_of_two(o.outputs[0].shape))
    scores = shapes.get("aten._softmax", set()) & set().union(*(shapes.get(op, set()) for op in _BATCHED))
    masked = set().union(*(shapes.get(op, set()) for op in _MASKS))
    scores = {shape for shape in scores - masked if min(shape[1:]) >= _SHORTEST}
    rows = [
        i for i, o in enumerate(evidence.operators) if any(_of_two(t.shape) in scores for t in (*o.inputs, *o.outputs))
    ]
    return operator_seconds(evidence, rows) > _SMALL_PART * evidence.steps.whole_s


def _of_two(shape: Sequence[int]) -> tuple[int, ...]:
    """Heads and samples on one axis, as batched products have them; (0, 0, 0) of fewer than two axes."""
    return (prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) >= 2 else (0, 0, 0)


def written_attention_in_graphs() -> Callable[[], None]:
    """Have attention that is written out in what is compiled from now on computed by `F.scaled_dot_product_attention`.

    Taken is attention without a mask whose weights are used for nothing else, and whose dropout, if any, is off: in 16 bits with
    heads of up to 256 on a GPU of compute capability 8.0 or later, and on a CPU. Sums are taken in another order.

    Returns:
        The undo.
    """
    return change_graphs(fuse_attention, __file__)


def fuse_attention(graph: Graph) -> int:
    """Change a graph of torch's own functions, before it is differentiated; the number of attentions that were."""
    num_changed = 0
    for node in list(graph.nodes):
        found = _attention(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            _replace(graph, node, found)
        for call in (node, *found.calls):
            for copy in [user for user in call.users if not user.users and called_name(user) in _CASTS]:
                graph.erase_node(copy)
            if not call.users:
                graph.erase_node(call)
        num_changed += 1
    return num_changed


def _replace(graph: Graph, node: Node, found: _SoftmaxOfProducts) -> None:
    def call(name: str, source: Node, *args: Any) -> Node:
        new, tensor = graph.call_method(name, (source, *args)), fake_result(source)
        if tensor is not None:
            new.meta["example_value"] = getattr(tensor, name)(*args)
        return new

    result = fake_result(node)
    key = call("transpose", found.key, -2, -1) if found.is_transposed else found.key
    inputs = [found.query, key, found.value]
    is_single = result is not None and result.dim() == 3
    if is_single:
        inputs = [call("unsqueeze", one, 1) for one in inputs]
    fused = graph.call_function(F.scaled_dot_product_attention, tuple(inputs), {"scale": found.scale})
    if result is not None:
        fused.meta["example_value"] = result.unsqueeze(1) if is_single else result
    if is_single:
        fused = call("squeeze", fused, 1)
    if _is_viewed(node):
        fused = call("contiguous", fused)  # a fused kernel may lay the heads of a position side by side
    node.replace_all_uses_with(fused)


def _is_viewed(node: Node) -> bool:
    """Whether a later call takes the layout that the product has for granted."""
    return any(called_name(u) == "view" or (called_name(u) in _MOVES and _is_viewed(u)) for u in node.users)


def _attention(node: Node) -> _SoftmaxOfProducts | None:
    """The attention whose last product this is."""
    product = _product(node, _VALUES)
    if product is None:
        return None
    weights, value, _ = product
    calls: list[Node] = []
    while (name := called_name(weights)) in ("dropout", *_CASTS):
        source = first_argument(weights)
        if source is None or not _is_read_once(weights) or (name == "dropout" and not _is_off(weights)):
            return None
        calls.append(weights)
        weights = source
    scores = first_argument(weights)
    if name != "softmax" or scores is None or not (_is_read_once(weights) and _is_over_keys(weights)):
        return None
    calls.append(weights)
    scale = 1.0
    while _is_read_once(scores) and (factor := _factor(scores)) is not None:
        calls.append(scores)
        scores, scale = factor[0], scale * factor[1]
    before = _product(scores, _SCORES) if _is_read_once(scores) else None
    if before is None:
        return None
    query, key, is_transposed = before
    found = _SoftmaxOfProducts(query, key, value, scale, is_transposed, (*calls, scores))
    return found if _is_known(node, found) else None


def _is_read_once(node: Node) -> bool:
    """Whether one call alone reads a result, beside copies that nothing reads."""
    return sum(bool(user.users) or called_name(user) not in _CASTS for user in node.users) == 1


def _is_known(node: Node, found: _SoftmaxOfProducts) -> bool:
    """Whether shapes are those of attention, a kernel computes it, and nothing writes to what it reads."""
    tensors = [fake_result(one) for one in (found.query, found.key, found.value)]
    result, scores = fake_result(node), fake_result(found.calls[-1])
    if result is None or scores is None or any(one is None for one in tensors):
        return False
    query, key, value = (one for one in tensors if one is not None)
    if found.is_transposed:
        key = key.transpose(-2, -1)
    is_shaped = result.dim() in (3, 4) and query.shape == result.shape and key.shape == value.shape
    is_shaped = is_shaped and query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
    return is_shaped and not _is_written_between(node, found) and _has_kernel(result, scores)


def _is_written_between(node: Node, found: _SoftmaxOfProducts) -> bool:
    """Whether something is changed in place after scores are computed: what the fused kernel reads may be."""
    call = found.calls[-1].next
    while call is not node:
        if call not in found.calls and changes_first(call):
            return True
        call = call.next
    return False


def _has_kernel(result: Tensor, scores: Tensor) -> bool:
    """Whether a fused kernel computes it, by the products' results: under autocast they are in 16 bits, whatever goes in."""
    if result.device.type != "cuda":
        return result.device.type == "cpu" and result.dtype == scores.dtype
    is_known = result.dtype in _HALF and scores.dtype == result.dtype and result.shape[-1] <= _WIDEST
    return is_known and torch.cuda.get_device_capability(result.device) >= _OLDEST


def _product(node: Node, equations: Sequence[str]) -> tuple[Node, Node, bool] | None:
    """The operands of a batched product, and whether the right one of scores is (..., D, S)."""
    is_scores, name = equations is _SCORES, called_name(node)
    if name == "einsum":
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = list(operands[0])
        if len(operands) != 2 or not isinstance(equation, str) or _renamed(equation, equations) not in equations:
            return None
    elif name in _PRODUCTS and len(node.args) == 2 and not node.kwargs:
        operands = list(node.args)
    else:
        return None
    left, right = operands
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    return left, right, is_scores and name != "einsum"


def _renamed(equation: str, like: Sequence[str]) -> str:
    """An equation with the letters of the one that is as long."""
    text = equation.replace(" ", "")
    letters: dict[str, str] = {}
    for pattern in like:
        if len(pattern) == len(text):
            for mine, theirs in zip(text, pattern, strict=True):
                if letters.setdefault(mine, theirs) != theirs:
                    return ""
            return pattern if len(set(letters.values())) == len(letters) else ""
    return ""


def _factor(node: Node) -> tuple[Node, float] | None:
    """What scores are multiplied with, and what of."""
    name = called_name(node).strip("_")
    if name not in ("mul", "div", "truediv", "multiply", "divide") or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if isinstance(left, Real) and isinstance(right, Node) and name in ("mul", "multiply"):
        left, right = right, left
    if not isinstance(left, Node) or not isinstance(right, Real) or not right:
        return None
    number = float(right)
    return left, number if name in ("mul", "multiply") else 1.0 / number


def _is_over_keys(node: Node) -> bool:
    tensor, named = fake_result(node), dict(zip(("input", "dim"), node.args, strict=False)) | node.kwargs
    dim = named.get("dim")
    return tensor is not None and isinstance(dim, int) and dim in (-1, tensor.dim() - 1)


def _is_off(dropout: Node) -> bool:
    named = dict(zip(("input", "p", "training"), dropout.args, strict=False)) | dropout.kwargs
    return bool(named.get("p", 0.5) == 0.0 or named.get("training", True) is False)
