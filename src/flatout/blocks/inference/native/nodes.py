"""Facts about a node of the graph: its shape, the part of it that is computed, its name and its line in the user's model."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import Node

aten = torch.ops.aten
SPLITS: Final = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
ADVICE: Final = 'change the model there, or take build(..., backend="aoti")'


class IndexRange(NamedTuple):
    """Elements start to stop - 1 of a dimension."""

    start: int
    stop: int


Box: TypeAlias = tuple[IndexRange, ...]
"""A part of a tensor: a range of each dimension."""


def shape_of(node: Any) -> tuple[int, ...]:
    """Shape of a node's tensor; of its first one where there are several; of a split, the shape of its input."""
    value = node.meta["val"]
    if node.target in SPLITS:
        return shape_of(node.args[0])
    return tuple(value[0].shape) if isinstance(value, (tuple, list)) else tuple(value.shape)


def full_box(node: Any) -> Box:
    """The box that contains all of a node's tensor."""
    return tuple(IndexRange(0, n) for n in shape_of(node))


def box_union(a: Box, b: Box) -> Box:
    """The smallest box around both."""
    return tuple(IndexRange(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


def broadcast_box(source: Node, box: Box) -> Box:
    """The part of `source` that broadcasts to a box."""
    shape = shape_of(source)
    tail = box[len(box) - len(shape) :]
    return tuple(IndexRange(0, 1) if n == 1 else part for n, part in zip(shape, tail, strict=True))


def positive_dim(node: Any, dim: int) -> int:
    """A dimension of a node's tensor, counted from the first one."""
    return dim + len(shape_of(node)) if dim < 0 else dim


def slice_of(node: Any) -> tuple[int, int, int, int]:
    """Dimension, start, stop and step of a slice."""
    args: Any = [*node.args[1:], *[None] * 5]
    source: Any = node.args[0]
    dim = positive_dim(source, args[0] or 0)
    length = shape_of(source)[dim]
    start, stop = (args[1] or 0), (length if args[2] is None else args[2])
    start = max(0, start + length if start < 0 else start)
    stop = min(length, stop + length if stop < 0 else stop)
    return dim, start, stop, args[3] or 1


def aten_name(target: object) -> str:
    """Name of an ATen operator without its overload, such as "add"; empty for others."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None and getattr(target, "namespace", "aten") == "aten" else ""


def note_of(node: Any) -> str:
    """The comment for a node's statements: its module's path in the model, and the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((p for p, _ in reversed(list(stack.values())) if p), "")
    name = aten_name(node.target) or getattr(node.target, "__name__", str(node.target))
    return f"{path}: {name}" if path else name


def source_line(node: Any) -> str:
    """The line of the user's code that a node comes from, in brackets; empty where it is not known."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    own = [i for i in frames if "/torch/" not in lines[i]] or frames
    if not own:
        return ""
    at = own[-1]
    file = lines[at].removeprefix("File ").split(", in ")[0].replace('"', "").replace(", line ", ":")
    code = lines[at + 1] if at + 1 < len(lines) and not lines[at + 1].startswith("File ") else ""
    return f" ({file}: {code})" if code else f" ({file})"


def native_dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in records. Raises NotImplementedError for one that native code does not have."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "int64", "int32", "bool"):
        raise NotImplementedError(f"numbers of {dtype} (native code computes in float32, and indexes by int64)")
    return name
