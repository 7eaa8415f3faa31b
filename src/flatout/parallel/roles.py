"""Which weights of a plain model tensor ranks divide: found by watching one forward on tensors without data.

A layer that leads from the stream between blocks to something wider, narrower or taken apart is divided by columns; the layer
that leads back to the stream is divided by rows, and its sum over ranks is the one collective of the pair (Shoeybi et al.,
Megatron-LM, 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flatout.errors import PlanError

Kind = Literal["columns", "rows", "vocabulary", "head"]


class Role(NamedTuple):
    """How a layer is divided. `parts`: columns of so many matrices side by side (q, k and v in one), each divided by itself."""

    kind: Kind
    parts: int = 1


class Call(NamedTuple):
    """A module that ran: its path, the identity of its first input, and the shapes of what it gave."""

    path: str
    module: nn.Module
    given: int
    out: Any


class Watched(NamedTuple):
    """A forward on tensors without data: modules in the order in which they began, and the parts that outputs were cut into."""

    calls: tuple[Call, ...]
    parts: Mapping[str, int]
    inputs: frozenset[int]

    def of(self, path: str) -> list[Call]:
        """The calls of one module."""
        return [call for call in self.calls if call.path == path]


def without_data(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no data; takes no memory."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def watch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Watched:
    """Run the model's forward without data.

    Raises PlanError where it looks at values or makes tensors on a device of its own.
    """
    bare = without_data(model)
    calls: list[Call] = []
    began: list[tuple[str, nn.Module, int]] = []
    kept: list[object] = []  # so that an identity is of one tensor
    cutting = _Cutting()
    handles = []
    for path, module in bare.named_modules():

        def before(module: nn.Module, given: tuple[Any, ...], path: str = path) -> None:
            kept.append(given)
            began.append((path, module, id(given[0]) if given else 0))
            calls.append(Call(path, module, id(given[0]) if given else 0, None))

        def after(module: nn.Module, given: tuple[Any, ...], out: Any, path: str = path) -> None:
            kept.append(out)
            at = max(i for i, call in enumerate(calls) if call.path == path and call.out is None)
            calls[at] = calls[at]._replace(out=out)
            if isinstance(module, nn.Linear) and isinstance(out, Tensor):
                cutting.made[id(out)] = path

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (tuple(args), dict(kwargs)))
    try:
        with torch.no_grad(), torch.device("meta"), cutting:
            bare(*args, **kwargs)
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as e:
        raise PlanError(
            f"the model cannot be run on tensors without data, which finds what to divide: {e}; leave out what reads values "
            "(item, print, if) and devices"
        ) from e
    finally:
        for handle in handles:
            handle.remove()
    inputs = frozenset(id(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    return Watched(tuple(calls), cutting.parts, inputs)


class _Cutting(TorchFunctionMode):
    """Sees into how many equal parts a layer's output is cut along its last dimension, right after the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}
        self.parts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        path = self.made.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if path is not None:
            parts = _parts_of(func, args[0], out)
            if parts > 1:
                self.parts[path] = parts
        return out


def _parts_of(func: Any, given: Tensor, out: Any) -> int:
    name = getattr(func, "__name__", "")
    if name in ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"):
        widths = [t.shape[-1] for t in out]
        if sum(widths) == given.shape[-1] and len(set(widths)) == 1:
            return len(widths)
        return -len(widths) if sum(widths) == given.shape[-1] else 1
    if name in ("view", "reshape", "unflatten") and isinstance(out, Tensor) and out.dim() == given.dim() + 2:
        first = out.shape[given.dim() - 1]
        return first if first in (2, 3) else 1
    return 1


def roles_of(watched: Watched, blocks: Sequence[str], num_ranks: int) -> dict[str, Role]:
    """The role of each layer that `num_ranks` tensor ranks can divide, by its path. Others stay whole on each."""
    found: dict[str, Role] = {}
    for block in blocks:
        linears = [c for c in watched.calls if isinstance(c.module, nn.Linear) and c.path.startswith(f"{block}.")]
        found |= _pairs(linears, _width(watched, block), watched.parts, num_ranks)
    inside = tuple(f"{block}." for block in blocks)
    last = max(i for i, c in enumerate(watched.calls) if c.path == blocks[-1])
    for number, call in enumerate(watched.calls):
        module = call.module
        if call.path.startswith(inside):
            continue
        if isinstance(module, nn.Embedding) and call.given in watched.inputs and module.num_embeddings % num_ranks == 0:
            found[call.path] = Role("vocabulary")
        if isinstance(module, nn.Linear) and number > last and module.out_features % num_ranks == 0:
            found[call.path] = Role("head")
    return found


def _width(watched: Watched, block: str) -> int:
    """Of the stream that blocks read from and add to."""
    out = watched.of(block)[0].out
    out = out[0] if isinstance(out, (tuple, list)) else out
    return int(out.shape[-1])


def _pairs(linears: Sequence[Call], width: int, parts: Mapping[str, int], num_ranks: int) -> dict[str, Role]:
    """Columns from the stream, and the rows that lead back to it; what is left open stays whole."""
    found: dict[str, Role] = {}
    open_: list[Call] = []
    for call in linears:
        layer = call.module
        assert isinstance(layer, nn.Linear)
        shares = any(call.given == other.given for other in open_)
        if open_ and not shares and layer.out_features == width:
            if layer.in_features % num_ranks == 0 and all(_divides(c, parts, num_ranks) for c in open_):
                found |= {c.path: Role("columns", parts.get(c.path, 1)) for c in open_}
                found[call.path] = Role("rows")
            open_ = []
        elif shares or layer.in_features == width:
            open_.append(call)
    return found


def _divides(call: Call, parts: Mapping[str, int], num_ranks: int) -> bool:
    layer = call.module
    assert isinstance(layer, nn.Linear)
    cut = parts.get(call.path, 1)
    return cut > 0 and layer.out_features % (cut * num_ranks) == 0
