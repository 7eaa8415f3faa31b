"""A graph of torch's functions on padded batches, made to compute with the rows that are not padding.

Dynamo's graph says of each value what shape it has. Values that begin with [B, T] as the tokens do, and of which each row is made
of its own row alone (an embedding, linear layers, norms over the last dimensions, pointwise functions), are computed of packed
rows [N, ...]. Where anything else reads such a value, attention or a sum over positions, it is unpacked, with zeros for padding.

B rows of a batch, T positions, N packed rows
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flatout.blocks.kernels.packed import attention
from flatout.blocks.kernels.packed.masks import Visible, bare_name, visible_under_mask
from flatout.blocks.kernels.packed.rows import (
    gather_expanded,
    gather_real,
    labelled_mask,
    labelled_tokens,
    offsets_of,
    spread_real,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_POINTWISE: Final = _words("""
    abs add clamp clamp_max clamp_min contiguous cos detach div divide elu erf erfc exp expm1 gelu hardtanh leaky_relu log log1p
    logsigmoid masked_fill maximum minimum mish mul multiply neg negative pow reciprocal relu rsqrt rsub selu sigmoid silu sin
    softplus sqrt square sub subtract tanh true_divide truediv where to type_as float half bfloat16 double
""")
_VIEWS: Final = _words("view reshape flatten unflatten unsqueeze squeeze")
_REDUCTIONS: Final = _words("mean sum var std norm amax amin softmax log_softmax")
_SPLITS: Final = _words("chunk split tensor_split")
_PRODUCTS: Final = _words("linear matmul")
_MOVES: Final = _words("transpose permute swapaxes swapdims movedim moveaxis t T mT adjoint rot90 roll flip")
_SAME: Final = _words("contiguous view reshape")
"""Which leave the numbers as they are, where the shape stays the same."""
_SWAPS: Final = _words("transpose swapaxes swapdims")
_ALIASES: Final = (
    _VIEWS
    | _SPLITS
    | _MOVES
    | _words("getitem expand narrow select unbind contiguous detach to float type_as relu silu")
)
"""Whose result may be a view of their first argument, or that itself."""
_IN_PLACE: Final = _words("iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift setitem")
_WITH_SWITCH: Final = _words("relu silu elu leaky_relu hardtanh mish selu")
"""Whose last argument may have them work in place."""
_DROPOUTS: Final = frozenset({"dropout"})


def compute_packed(graph: fx.GraphModule, *, pad: int = 0) -> int | None:
    """Have a graph in which tokens are labelled compute of their packed rows; padding is where tokens are `pad`.

    Returns the number of products that do so now; None where no tokens are labelled, as behind a graph break.
    """
    labels = [n for n in graph.graph.nodes if n.target in _LABELS]
    if len(labels) != 1:
        return None
    return _Packing(graph.graph, labels[0], pad).run()


_LABELS: Final = (labelled_tokens, torch.ops.flatout.labelled_tokens, torch.ops.flatout.labelled_tokens.default)
_LABELLED_MASKS: Final = (labelled_mask, torch.ops.flatout.labelled_mask, torch.ops.flatout.labelled_mask.default)
_ATTENTION: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""The arguments of scaled_dot_product_attention."""


class _Packing:
    def __init__(self, graph: fx.Graph, label: fx.Node, pad: int) -> None:
        self._graph, self._label, self._pad = graph, label, pad
        arguments: Any = label.args
        _, self._index, self._inverse, self._is_trailing = arguments
        self._leads: tuple[Any, Any] = tuple(label.meta["example_value"].shape)
        self._rows: dict[fx.Node, fx.Node] = {}
        """Of each value that is computed packed its packed rows, or a tuple of such."""
        self._packed: dict[fx.Node, fx.Node] = {}
        """Of values that are not, their rows, taken out."""
        self._heads: dict[fx.Node, fx.Node] = {}
        """Of each value [B, H, T, D] that is computed packed its rows [N, H, D]."""
        self._changed: set[fx.Node] = set()
        self._num_products = 0
        self._visible: dict[fx.Node, Visible | None] = {}
        self._offsets: fx.Node | None = None
        self._longest: fx.Node | None = None

    def run(self) -> int:
        """Add packed values, and put them where padded ones are read."""
        nodes = list(self._graph.nodes)
        calls = [n for n in nodes if n.op in ("call_function", "call_method")]
        self._changed = _changed_in_place(calls)
        for node in calls if not any(map(self._is_ambiguous, calls)) else ():
            if node not in self._changed:
                with self._behind(node):
                    rows = self._computed(node)
                    heads = self._of_heads(node) if rows is None else None
                if rows is not None:
                    self._rows[node] = rows
                elif heads is not None:
                    self._heads[node] = heads
        if self._num_products:
            self._put_in(nodes)
        else:
            for node in reversed([n for n in self._graph.nodes if n not in set(nodes)]):
                self._graph.erase_node(node)
        for node in (self._label, *self._labelled_masks()):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            self._graph.erase_node(node)
        return self._num_products

    def _labelled_masks(self) -> list[fx.Node]:
        return [n for n in self._graph.nodes if n.target in _LABELLED_MASKS]

    def _is_ambiguous(self, node: fx.Node) -> bool:
        """Whether rows or positions change places with a dimension of the same length: shapes do not tell them apart then."""
        if bare_name(node) not in _MOVES or not self._is_of(node) or not self._is_of(node.args[0]):
            return False
        num = self._value(node).dim()
        listed = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
        dims = [d % num for d in listed if isinstance(d, int)]
        if bare_name(node) == "permute":
            return dims[:2] != [0, 1]
        return len(dims) != 2 or min(dims) < 2

    def _put_in(self, nodes: list[fx.Node]) -> None:
        own, unread = set(nodes), set(self._rows)
        for node in reversed(nodes):
            if node in self._heads and all(user in unread for user in node.users if user in own):
                unread.add(node)
        for node, rows in self._rows.items():
            readers = [user for user in node.users if user in own and user not in unread]
            if readers and not _is_tuple(node):
                with self._behind(rows):
                    dense = self._graph.call_function(spread_real, (rows, self._index, self._inverse))
                for reader in readers:
                    reader.replace_input_with(node, dense)
        for node in reversed(nodes):
            if node in unread and not node.users:
                self._graph.erase_node(node)
        # an array whose rows are taken out for a value that nobody reads
        for node in reversed(list(self._graph.nodes)):
            if node not in own and not node.users:
                self._graph.erase_node(node)

    # -- which values are computed of rows ---------------------------------------------------------------------------------

    def _computed(self, node: fx.Node) -> fx.Node | None:
        """The node's packed rows, computed of packed rows; None where that cannot be."""
        name, value = bare_name(node), node.meta.get("example_value")
        if _swaps_heads(node) and node.args[0] in self._heads:
            return self._heads[node.args[0]]  # type: ignore[index]
        if name == "getitem" and isinstance(node.args[1], int):
            whole = node.args[0]
            if isinstance(whole, fx.Node) and whole in self._rows and _is_tuple(whole):
                return self._graph.call_function(operator.getitem, (self._rows[whole], node.args[1]))
            return None
        if name in _SPLITS:
            return self._split(node)
        # Zeros stand for padding where rows are put back; as a yes or no, a mask for example, they would say something.
        if not isinstance(value, Tensor) or not self._is_padded(value) or not value.is_floating_point():
            return None
        if name == "embedding":
            return self._embedding(node)
        if name in _PRODUCTS:
            return self._product(node)
        if name == "cat":
            return self._cat(node, value)
        if not any(isinstance(a, fx.Node) and a in self._rows for a in node.args):
            return None
        first: Any = node.args[0]
        if name in ("layer_norm", "rms_norm"):
            is_own = isinstance(node.args[1], (tuple, list, torch.Size)) and len(node.args[1]) <= value.dim() - 2
            return self._again(node, self._rows[first]) if is_own and first in self._rows else None
        if name in _REDUCTIONS:
            return self._reduction(node, value)
        if name in _VIEWS:
            return self._view(first, value)
        if name == "getitem":
            return self._part(node, value)
        if name in _POINTWISE or (name in _DROPOUTS and _draws_nothing(node)):
            return self._pointwise(node, value)
        return None

    def _embedding(self, node: fx.Node) -> fx.Node | None:
        tokens: Any = node.args[0]
        max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
        if max_norm is not None or not self._is_of(tokens, 2):
            return None
        return self._again(node, self._of(tokens))

    def _product(self, node: fx.Node) -> fx.Node | None:
        """A linear layer, also of an array that is not packed yet: products are what padding costs most."""
        first, second = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        weight = second.meta.get("example_value") if isinstance(second, fx.Node) else None
        is_plain = isinstance(weight, Tensor) and weight.dim() == 2 and second not in self._rows
        if not is_plain or not isinstance(first, fx.Node) or not self._is_of(first) or self._value(first).dim() < 3:
            return None
        self._num_products += 1
        return self._again(node, self._of(first))

    def _split(self, node: fx.Node) -> fx.Node | None:
        first: Any = node.args[0]
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if not isinstance(first, fx.Node) or first not in self._rows or not isinstance(dim, int):
            return None
        if any(bare_name(u) != "getitem" or not isinstance(u.args[1], int) for u in node.users):
            return None
        if not self._is_own(dim, self._value(first).dim()):
            return None
        args = (self._rows[first], node.args[1]) if len(node.args) > 1 else (self._rows[first],)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "dim"}
        return self._graph.create_node(node.op, node.target, args, kwargs | {"dim": self._moved(dim)})

    def _cat(self, node: fx.Node, value: Tensor) -> fx.Node | None:
        parts: Any = node.args[0]
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, (list, tuple)) or not isinstance(dim, int) or not self._is_own(dim, value.dim()):
            return None
        if not any(p in self._rows for p in parts) or not all(self._is_of(p, value.dim()) for p in parts):
            return None
        rows = [self._of(p) for p in parts]
        return self._graph.call_function(torch.cat, (rows,), {"dim": self._moved(dim)})

    def _reduction(self, node: fx.Node, value: Tensor) -> fx.Node | None:
        """A sum or mean over a row's own dimensions."""
        first: Any = node.args[0]
        if first not in self._rows:
            return None
        at = 2 if bare_name(node) == "norm" else 1
        dims = node.args[at] if len(node.args) > at else node.kwargs.get("dim")
        listed = dims if isinstance(dims, (list, tuple)) else (dims,)
        num = self._value(first).dim()
        if not all(isinstance(d, int) and self._is_own(d, num) for d in listed):
            return None
        moved = [self._moved(d) for d in listed]
        new = moved if isinstance(dims, (list, tuple)) else moved[0]
        args, kwargs = list(node.args), dict(node.kwargs)
        args[0] = self._of(first)
        if len(args) > at:
            args[at] = new
        else:
            kwargs["dim"] = new
        return self._graph.create_node(node.op, node.target, tuple(args), kwargs)

    def _view(self, first: fx.Node, value: Tensor) -> fx.Node | None:
        """A view that leaves rows and positions as they are."""
        own = value.shape[2:]
        if first not in self._rows or not all(isinstance(n, int) for n in own):
            return None
        return self._graph.call_method("reshape", (self._rows[first], (-1, *own)))

    def _part(self, node: fx.Node, value: Tensor) -> fx.Node | None:
        """A part of a row's own dimensions, of all rows."""
        arguments: Any = node.args
        first, index = arguments
        if first not in self._rows or not isinstance(index, tuple):
            return None
        if index[:1] == (...,):
            num_own = sum(i is not None for i in index[1:])
            is_simple = all(isinstance(i, (int, slice)) or i is None for i in index[1:])
            if not is_simple or num_own > self._value(first).dim() - 2:
                return None
            return self._graph.call_function(operator.getitem, (self._rows[first], index))
        if (
            len(index) > 2
            and index[:2] == (slice(None), slice(None))
            and all(isinstance(i, (int, slice)) for i in index[2:])
        ):
            return self._graph.call_function(operator.getitem, (self._rows[first], (slice(None), *index[2:])))
        return None

    def _pointwise(self, node: fx.Node, value: Tensor) -> fx.Node | None:
        num_own = value.dim() - 2

        def own(arg: Any) -> Any:
            if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("example_value"), Tensor):
                return arg
            if arg in self._rows or self._is_of(arg, value.dim()):
                return self._of(arg) if self._value(arg).dim() == value.dim() else None
            if bare_name(node) == "type_as" or self._value(arg).dim() <= num_own:
                return arg
            if self._value(arg).dim() > value.dim():
                return None
            return self._graph.call_function(gather_expanded, (arg, num_own, self._index, self._inverse))

        args = [own(a) for a in node.args]
        kwargs = {k: own(v) for k, v in node.kwargs.items()}
        if any(
            a is None and b is not None
            for a, b in zip((*args, *kwargs.values()), (*node.args, *node.kwargs.values()), strict=True)
        ):
            return None
        return self._graph.create_node(node.op, node.target, tuple(args), kwargs)

    # -- attention ----------------------------------------------------------------------------------------------------------

    def _of_heads(self, node: fx.Node) -> fx.Node | None:
        """The packed rows of a value [B, H, T, D], as attention takes and returns it."""
        first: Any = node.args[0] if node.args else None
        if _swaps_heads(node) and first in self._rows:
            return self._rows[first]
        if bare_name(node) in _SAME and first in self._heads and self._is_as_long(node, first):
            return self._heads[first]
        return self._attention(node) if bare_name(node) == "scaled_dot_product_attention" else None

    def _is_as_long(self, one: fx.Node, other: fx.Node) -> bool:
        shapes = self._value(one).shape, self._value(other).shape
        return len(shapes[0]) == len(shapes[1]) and all(
            statically_known_true(a == b) for a, b in zip(*shapes, strict=True)
        )

    def _attention(self, node: fx.Node) -> fx.Node | None:
        arguments: dict[str, Any] = dict(zip(_ATTENTION, node.args, strict=False)) | node.kwargs
        operands, mask = [arguments.get(name) for name in _ATTENTION[:3]], arguments.get("attn_mask")
        if not all(isinstance(o, fx.Node) and o in self._heads for o in operands):
            return None
        scale = arguments.get("scale")
        if arguments.get("dropout_p", 0.0) != 0 or not (scale is None or isinstance(scale, (int, float))):
            return None
        dtype, values = self._value(node).dtype, [self._value(o) for o in operands]
        if attention.refusal(*(v.to(dtype) for v in values)) is not None:
            return None
        visible = self._visible_under(mask, arguments.get("is_causal", False))
        if visible is None:
            return None
        rows = [
            self._heads[o] if v.dtype == dtype else self._graph.call_method("to", (self._heads[o], dtype))  # type: ignore[index]
            for o, v in zip(operands, values, strict=True)
        ]
        scale = float(scale) if scale is not None else values[0].size(-1) ** -0.5
        how = (self._index, *self._places(), visible == "before", scale)
        return self._graph.call_function(attention.attention_of_rows, (*rows, *how))

    def _visible_under(self, mask: Any, is_causal: Any) -> Visible | None:
        """What real tokens see; None where that is not certain, or not real tokens alone."""
        if mask is None:  # what comes before a real token is real where padding lies behind
            return "before" if is_causal is True and self._is_trailing is True else None
        if not isinstance(mask, fx.Node) or is_causal is not False:
            return None
        if mask not in self._visible:
            known: dict[fx.Node, Any] = {self._label: "tokens"}
            known |= dict.fromkeys(self._labelled_masks(), "is real")
            rows, width = (n if isinstance(n, int) else n.node.hint for n in self._leads)
            is_certain = not any(n in self._changed for n in (*known, mask))
            found = visible_under_mask(mask, known, pad=self._pad, shape=(rows, width)) if is_certain else None
            self._visible[mask] = found
        return self._visible[mask]

    def _places(self) -> tuple[fx.Node, fx.Node]:
        """Where the rows of each sample begin, and the most that one has: all positions."""
        if self._offsets is None or self._longest is None:
            with self._behind(self._label):
                self._offsets = self._graph.call_function(offsets_of, (self._inverse,))
                self._longest = self._graph.call_method("size", (self._inverse, 1))
        return self._offsets, self._longest

    def _behind(self, node: fx.Node) -> AbstractContextManager[Any]:
        """New nodes go behind this one, in the order in which they are made, and behind all inputs."""
        first = node.next
        while first.op == "placeholder":
            first = first.next
        return self._graph.inserting_before(first)

    # -- values -------------------------------------------------------------------------------------------------------------

    def _again(self, node: fx.Node, first: fx.Node) -> fx.Node:
        """The same call on other rows."""
        return self._graph.create_node(node.op, node.target, (first, *node.args[1:]), dict(node.kwargs))

    def _of(self, node: fx.Node) -> fx.Node:
        """The packed rows of a value that begins with [B, T]."""
        if node in self._rows:
            return self._rows[node]
        if node not in self._packed or self._changed:  # taken out where it is read: it may have been changed since
            self._packed[node] = self._graph.call_function(gather_real, (node, self._index, self._inverse))
        return self._packed[node]

    @staticmethod
    def _value(node: Any) -> Tensor:
        value: Tensor = node.meta["example_value"]
        return value

    def _is_of(self, node: Any, num_dims: int | None = None) -> bool:
        """Whether a node is an array that begins with [B, T], of so many dimensions."""
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        return isinstance(value, Tensor) and self._is_padded(value) and num_dims in (None, value.dim())

    def _is_padded(self, value: Tensor) -> bool:
        return value.dim() >= 2 and all(
            statically_known_true(a == b) for a, b in zip(value.shape[:2], self._leads, strict=True)
        )

    @staticmethod
    def _is_own(dim: int, num_dims: int) -> bool:
        """Whether it is a dimension of a row's own."""
        return dim % num_dims >= 2

    @staticmethod
    def _moved(dim: int) -> int:
        """A row's own dimension in packed rows."""
        return dim if dim < 0 else dim - 1


def _swaps_heads(node: fx.Node) -> bool:
    """Whether positions and heads of [B, T, H, D] or [B, H, T, D] change places, and nothing else happens."""
    value, name = node.meta.get("example_value"), bare_name(node)
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    listed = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
    if not all(isinstance(d, int) for d in listed):
        return False
    dims = [d % 4 for d in listed]  # type: ignore[operator]
    return dims == [0, 2, 1, 3] if name == "permute" else name in _SWAPS and sorted(dims) == [1, 2]


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (tuple, list))


def _is_in_place(node: fx.Node) -> bool:
    """Whether a call changes its first argument, or writes into `out`."""
    name, arguments = bare_name(node), node.args
    is_switched = node.kwargs.get("inplace") is True or (name in _WITH_SWITCH and arguments[-1:] == (True,))
    is_switched |= name in _DROPOUTS and arguments[3:4] == (True,)
    return name in _IN_PLACE or name.endswith("_") or is_switched or "out" in node.kwargs


def _changed_in_place(calls: list[fx.Node]) -> set[fx.Node]:
    """What is changed in place, and all that it may be a view of."""
    found: set[fx.Node] = set()
    for node in filter(_is_in_place, calls):
        targets = [node.args[0] if node.args else None, node.kwargs.get("out")]
        while targets:
            target = targets.pop()
            if isinstance(target, fx.Node) and target not in found:
                found.add(target)
                targets += [target.args[0]] if target.args and bare_name(target) in _ALIASES else []
    return found


def _draws_nothing(node: fx.Node) -> bool:
    """Whether a dropout leaves its input as it is."""
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    is_training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(p == 0) or is_training is False


_NOTHING_PACKED: Final = (
    "skip_padding leaves no padding out of these shapes: no product of the graph is made of each token alone, or the length "
    "of the rows is that of another dimension which changes places with it"
)
Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def packing(backend: Backend, *, pad: int = 0) -> Backend:
    """The backend of torch.compile that packs rows of tokens that are not `pad`, and hands the graph on."""

    def packed(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if compute_packed(graph, pad=pad) == 0:
            warnings.warn(_NOTHING_PACKED, stacklevel=2)
        graph.recompile()
        return backend(graph, inputs)

    return packed
