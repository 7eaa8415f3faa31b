"""Which operators a training step runs, on what, and what it keeps for backward: seen on a copy without data.

The step runs on fake tensors: shapes, strides and types alone. Autograd itself decides what it computes and keeps, so that what
is frozen, reached or saved is not guessed. Nothing of the model, its gradients or the random state is touched.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from flatout.errors import UsageError

Loss = Callable[[Any], Tensor]


class Like(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


class Call(NamedTuple):
    """An operator and its arguments, tensors as `Like`; equal ones cost the same."""

    operator: Any
    leaves: tuple[Hashable, ...]
    tree: Any

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Ready to call: tensors of random numbers, indices that are within what they point to."""
        made = [_made(leaf, self) if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(made, self.tree)
        return args, kwargs


class Ledger(NamedTuple):
    """Of one step."""

    forward: Counter[Call]
    backward: Counter[Call]
    saved_bytes: int
    trained: tuple[Like, ...]


def squares(outputs: Any) -> Tensor:
    """The mean of squares of all floating-point outputs, summed: a loss where none is given."""
    found = [t.float().square().mean() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    if not found:
        raise UsageError("the model returns no floating-point tensor; give a loss")
    return torch.stack(found).sum()


def recorded(
    model: nn.Module, inputs: tuple[Any, ...], loss: Loss, change: Callable[[nn.Module], object] | None = None
) -> Ledger:
    """The step of a copy without data, which `change` may adapt first.

    Raises UsageError where the step looks at the values of its tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bare = _without_data(model, mode)
    given = tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, inputs)
    forward, backward = _Recorder(), _Recorder()
    try:
        with mode:
            if change is not None:
                change(bare)
            kept: dict[int, Tensor] = {}
            with forward, _saving(kept):
                value = loss(bare(*given))
            if not value.requires_grad:
                raise UsageError("the loss does not depend on anything that is trained; train something that it sees")
            with backward:
                value.backward()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as e:
        raise UsageError(
            f"the step cannot be run without data: {e}; predict a part of the model that does not look at values"
        ) from e
    held = {
        t.untyped_storage()._cdata
        for t in (*bare.parameters(), *bare.buffers(), *tree_leaves(given))
        if isinstance(t, Tensor)
    }
    saved = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in held)
    trained = tuple(_like(p) for p in bare.parameters() if p.requires_grad)
    return Ledger(forward.calls, backward.calls, saved, trained)


def without_graph(model: nn.Module, inputs: tuple[Any, ...], loss: Loss) -> Counter[Call]:
    """Operators of the forward of a copy without data, in which nothing is trained: some run others then (a GRU copies less).

    For a model of which `recorded` has told that it can be run without data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bare = _without_data(model, mode).requires_grad_(False)
    given = tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, inputs)
    forward = _Recorder()
    with mode, forward:
        loss(bare(*given))
    return forward.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        named = tuple(_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if not func.is_view and func.namespace != "prim":
            self.calls[Call(func, named, tree)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _saving(kept: dict[int, Tensor]) -> Iterator[None]:
    """Note what autograd saves, each storage once."""

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def _without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are fake: the copier is told that it has copied them already."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(mode.from_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer)
    return copy.deepcopy(model, memo)


def _like(tensor: Tensor) -> Like:
    return Like(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))


def _made(like: Like, call: Call) -> Tensor:
    size = 1 + sum((length - 1) * step for length, step in zip(like.shape, like.stride, strict=True))
    size = 0 if 0 in like.shape else size
    if like.dtype.is_floating_point:
        flat = torch.rand(size, device=like.device).to(like.dtype)
    elif like.dtype == torch.bool:
        flat = torch.ones(size, dtype=torch.bool, device=like.device)
    else:
        flat = torch.randint(_below(call), (size,), dtype=like.dtype, device=like.device)
    return flat.as_strided(like.shape, like.stride)


def _below(call: Call) -> int:
    """What indices of an operator may not reach."""
    name = call.operator._schema.name
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Like)]
    if name == "aten::embedding":
        return tensors[0].shape[0]
    if name == "aten::embedding_dense_backward":
        return next(int(leaf) for leaf in call.leaves if type(leaf) is int)
    if name.startswith("aten::nll_loss_forward"):
        return tensors[0].shape[-1]
    if name.startswith("aten::nll_loss_backward"):
        return tensors[1].shape[-1]
    return 1
