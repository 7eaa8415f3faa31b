"""The weights of a plain model that tensor ranks divide, found by observing one forward on tensors without data.

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

from flatout.core.errors import PlanError
from flatout.core.tensors.nests import tree_map_only

RoleKind = Literal["columns", "rows", "vocabulary", "head"]


class Role(NamedTuple):
    """How a layer is divided. `parts`: columns of so many matrices side by side (q, k and v in one), each divided by itself."""

    kind: RoleKind
    parts: int = 1


class ModuleCall(NamedTuple):
    """A module that ran: its path, the identity of its first input, and its output, without data."""

    path: str
    module: nn.Module
    input_id: int
    out: Any


class ObservedForward(NamedTuple):
    """A forward on tensors without data: modules in the order in which they began, and the parts that outputs were cut into."""

    calls: tuple[ModuleCall, ...]
    parts: Mapping[str, int]
    inputs: frozenset[int]

    def of(self, path: str) -> list[ModuleCall]:
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


def observe_forward(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObservedForward:
    """Run the model's forward without data.

    Raises PlanError where it looks at values or makes tensors on a device of its own.
    """
    bare = without_data(model)
    calls: list[ModuleCall] = []
    alive: list[object] = []  # so that an identity is of one tensor
    splits = _SplitObserver()
    handles = []
    for path, module in bare.named_modules():

        def before(module: nn.Module, inputs: tuple[Any, ...], path: str = path) -> None:
            alive.append(inputs)
            calls.append(ModuleCall(path, module, id(inputs[0]) if inputs else 0, None))

        def after(module: nn.Module, inputs: tuple[Any, ...], out: Any, path: str = path) -> None:
            alive.append(out)
            at = max(i for i, call in enumerate(calls) if call.path == path and call.out is None)
            calls[at] = calls[at]._replace(out=out)
            if isinstance(module, nn.Linear) and isinstance(out, Tensor):
                splits.producers[id(out)] = path

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (tuple(args), dict(kwargs)))
    try:
        with torch.no_grad(), torch.device("meta"), splits:
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
    return ObservedForward(tuple(calls), splits.parts, inputs)


class _SplitObserver(TorchFunctionMode):
    """Observes into how many equal parts a layer's output is cut along its last dimension, right after the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.producers: dict[int, str] = {}
        self.parts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        path = self.producers.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if path is not None:
            parts = _parts_of(func, args[0], out)
            if parts > 1:
                self.parts[path] = parts
        return out


def _parts_of(func: Any, source: Tensor, out: Any) -> int:
    name = getattr(func, "__name__", "")
    if name in ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"):
        widths = [t.shape[-1] for t in out]
        if sum(widths) == source.shape[-1] and len(set(widths)) == 1:
            return len(widths)
        return -len(widths) if sum(widths) == source.shape[-1] else 1
    if name in ("view", "reshape", "unflatten") and isinstance(out, Tensor) and out.dim() == source.dim() + 2:
        first = out.shape[source.dim() - 1]
        return first if first in (2, 3) else 1
    return 1


def roles_of(observed: ObservedForward, blocks: Sequence[str], num_ranks: int) -> dict[str, Role]:
    """The role of each layer that `num_ranks` tensor ranks can divide, by its path. Others stay whole on each."""
    found: dict[str, Role] = {}
    for block in blocks:
        linears = [c for c in observed.calls if isinstance(c.module, nn.Linear) and c.path.startswith(f"{block}.")]
        found |= _pairs(linears, _width(observed, block), observed.parts, num_ranks)
    inside = tuple(f"{block}." for block in blocks)
    last = max(i for i, c in enumerate(observed.calls) if c.path == blocks[-1])
    for number, call in enumerate(observed.calls):
        module = call.module
        if call.path.startswith(inside):
            continue
        if (
            isinstance(module, nn.Embedding)
            and call.input_id in observed.inputs
            and module.num_embeddings % num_ranks == 0
        ):
            found[call.path] = Role("vocabulary")
        if isinstance(module, nn.Linear) and number > last and module.out_features % num_ranks == 0:
            found[call.path] = Role("head")
    return found


def _width(observed: ObservedForward, block: str) -> int:
    """The width of the stream that blocks read from and add to."""
    out = observed.of(block)[0].out
    out = out[0] if isinstance(out, (tuple, list)) else out
    return int(out.shape[-1])


def _pairs(linears: Sequence[ModuleCall], width: int, parts: Mapping[str, int], num_ranks: int) -> dict[str, Role]:
    """Columns from the stream, and the rows that lead back to it; what is left open stays whole."""
    found: dict[str, Role] = {}
    open_: list[ModuleCall] = []
    for call in linears:
        layer = call.module
        assert isinstance(layer, nn.Linear)
        shares = any(call.input_id == other.input_id for other in open_)
        if open_ and not shares and layer.out_features == width:
            if layer.in_features % num_ranks == 0 and all(_divides(c, parts, num_ranks) for c in open_):
                found |= {c.path: Role("columns", parts.get(c.path, 1)) for c in open_}
                found[call.path] = Role("rows")
            open_ = []
        elif shares or layer.in_features == width:
            open_.append(call)
    return found


def _divides(call: ModuleCall, parts: Mapping[str, int], num_ranks: int) -> bool:
    layer = call.module
    assert isinstance(layer, nn.Linear)
    cut = parts.get(call.path, 1)
    return cut > 0 and layer.out_features % (cut * num_ranks) == 0
