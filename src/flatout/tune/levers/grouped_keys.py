"""Attention in compiled code reads the keys of a group of queries once, where a script repeats them for each head.

Llama-like models have fewer heads of keys and values than of queries. Many repeat them, by `repeat_interleave` or by `expand` and
`reshape`, and call `scaled_dot_product_attention` on the copies; its kernels take them as they are (`enable_gqa`). Copies of a
Llama-like model with 8 heads of keys for 32 of queries take 128 MiB a layer (4 x 4096 tokens, heads of 64, bfloat16), which the
backward keeps, and some 1.2 of 179 ms of a step (bench/results/2026-11-30-h200, account_lora_plan).
"""

# B batch, G heads of keys, H heads of queries, T keys, D width of a head

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from flatout.core.records.evidence import Evidence
from flatout.tune.levers.graph_passes import called_name, change_graphs, changes_first, fake_result, first_argument

_ATTENTION: Final = F.scaled_dot_product_attention
_NAMES: Final = ("query", "key", "value", "attn_mask")
_HALF: Final = (torch.bfloat16, torch.float16)
_WIDEST: Final = 128
"""Of a head, for FlashAttention's and cuDNN's kernels on all of these devices."""
_OLDEST: Final = (8, 0)
"""The compute capability from which there is a fused kernel that knows groups: the memory-efficient one does not."""


class _Repeated(NamedTuple):
    """Keys or values whose every head stands so many times in a row, and the calls that made the copies, the last first."""

    source: Node
    times: int
    axis: int
    """Of the heads in the source: 1, or 2 where the copies are transposed behind it."""
    calls: tuple[Node, ...]


def repeats_keys(evidence: Evidence) -> bool:
    """Whether a forward copies something as keys of G heads are repeated for attention with G * count heads.

    Copies are (B, G, count, T, D), or (B, T, G, count, D).
    """
    heads = {
        (t.shape[0], t.shape[1], t.shape[3])
        for o in evidence.operators
        if "scaled_dot_product" in o.op and o.phase == "forward"
        for t in o.inputs[:1]
        if len(t.shape) == 4
    }
    copies = [
        o.inputs[0].shape for o in evidence.operators if o.op == "aten.clone" and o.phase == "forward" and o.inputs
    ]
    by_heads = any(len(s) == 5 and s[2] > 1 and (s[0], s[1] * s[2], s[4]) in heads for s in copies)
    return by_heads or any(len(s) == 5 and s[3] > 1 and (s[0], s[2] * s[3], s[4]) in heads for s in copies)


def keys_read_once_in_graphs() -> Callable[[], None]:
    """Have attention in what is compiled from now on read keys and values that the code repeats as they were before.

    Taken are calls without a mask: in 16 bits with heads of up to 128 on a GPU of compute capability 8.0 or later, whose kernels
    for that know groups, and on a CPU; all others stay, as torch might compute them without a fused kernel. The result is the
    same; gradients of keys and values are summed over a group by the kernel, in another order.

    Returns:
        The undo.
    """
    return change_graphs(read_keys_once, __file__)


def read_keys_once(graph: Graph) -> int:
    """Change a graph of torch's own functions, before it is differentiated; the number of calls of attention that were."""
    num_changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _ATTENTION:
            continue
        named = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        key, value = (_repeated(named[name]) for name in ("key", "value"))
        if key is None or value is None or named.get("attn_mask") is not None or named.get("enable_gqa"):
            continue
        if key.times != value.times or not _has_kernel(fake_result(node)):
            continue
        with graph.inserting_before(node):
            by_heads = [_with_heads_first(graph, one) for one in (key, value)]
        if len(node.args) >= 3:
            node.args = (node.args[0], *by_heads, *node.args[3:])
        else:
            node.args, node.kwargs = node.args[:1], {**node.kwargs, "key": by_heads[0], "value": by_heads[1]}
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        for call in dict.fromkeys((*key.calls, *value.calls)):
            if not call.users:
                graph.erase_node(call)
        num_changed += 1
    return num_changed


def _with_heads_first(graph: Graph, found: _Repeated) -> Node:
    if found.axis == 1:
        return found.source
    node, tensor = graph.call_method("transpose", (found.source, 1, 2)), fake_result(found.source)
    if tensor is not None:
        node.meta["example_value"] = tensor.transpose(1, 2)
    return node


def _has_kernel(result: Tensor | None) -> bool:
    """By the result: under autocast it is in 16 bits, whatever the keys are before the call."""
    if result is None or result.dim() != 4:
        return False
    if result.device.type != "cuda":
        return result.device.type == "cpu"
    is_known = result.dtype in _HALF and result.shape[-1] <= _WIDEST
    return is_known and torch.cuda.get_device_capability(result.device) >= _OLDEST


def _repeated(node: Any) -> _Repeated | None:
    if not isinstance(node, Node):
        return None
    found = _copied(node, 1)
    if found is None and called_name(node) == "transpose" and node.args[1:] in ((1, 2), (2, 1)):
        copies = first_argument(node)
        found = None if copies is None else _copied(copies, 2)
        found = None if found is None else found._replace(calls=(node, *found.calls))
    return found


def _copied(node: Node, axis: int) -> _Repeated | None:
    """What the copies are of, if their heads lie on this axis."""
    calls: list[Node] = []
    for call in _inwards(node):
        calls.append(call)
        source, result = first_argument(call), fake_result(node)
        of_source = None if source is None else fake_result(source)
        if source is None or of_source is None or result is None or of_source.dim() != 4 or result.dim() != 4:
            continue
        shape, copied = list(of_source.shape), list(result.shape)
        is_known = isinstance(shape[axis], int) and isinstance(copied[axis], int) and shape[axis]
        count = copied[axis] // shape[axis] if is_known else 0
        shape[axis] *= count
        if count < 2 or copied != shape:
            continue
        if any(map(changes_first, source.users)):
            return None  # perhaps after the copies were made
        if _is_repeat(calls, count, axis) or _are_copies(calls, count, axis):
            return _Repeated(source, count, axis, tuple(calls))
    return None


def _inwards(node: Node) -> Iterator[Node]:
    """The calls that copies may be made by, from the last on."""
    current: Node | None = node
    while current is not None and called_name(current) in (
        "contiguous",
        "repeat_interleave",
        "reshape",
        "view",
        "expand",
        "[]",
    ):
        yield current
        current = first_argument(current)


def _is_repeat(calls: list[Node], count: int, axis: int) -> bool:
    """`x.repeat_interleave(count, dim=axis)`, behind which nothing reorders the heads."""
    *later, call = calls
    if called_name(call) != "repeat_interleave" or any(called_name(one) != "contiguous" for one in later):
        return False
    named = dict(zip(("input", "repeats", "dim"), call.args, strict=False)) | call.kwargs
    repeats, dim = named.get("repeats"), named.get("dim")
    return isinstance(repeats, int) and repeats == count and dim in (axis, axis - 4)


def _are_copies(calls: list[Node], count: int, axis: int) -> bool:
    """`x[:, :, None, :, :].expand(B, G, count, T, D).reshape(B, G * count, T, D)`: a new axis behind that of the heads."""
    names = [called_name(one) for one in calls if called_name(one) != "contiguous"]
    if names not in (["reshape", "expand", "[]"], ["view", "expand", "[]"]):
        return False
    index = [slice(None)] * 4
    if calls[-1].args[1] != (*index[: axis + 1], None, *index[axis + 1 :]):
        return False
    expanded = next((fake_result(one) for one in calls if called_name(one) == "expand"), None)
    return expanded is not None and expanded.dim() == 5 and int(expanded.shape[axis + 1]) == count
