"""A linear layer of whose rows only those are computed that are read, as where a loss is taken of a sequence's second half.

The layer returns a tensor that has the shape of all rows. Rows taken of it by an index are computed from the same rows of the
layer's input; anything else that is done with it computes all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.core.errors import UsageError
from flatout.core.runtime.patches import replace_forward
from flatout.core.tensors.nests import tree_map_only

_MOST_READS: Final = 2
"""Reads of one result after which all of it is computed: a loop over its rows would take small products."""
_METADATA: Final = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.element_size),
        *(Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.dtype.__get__, Tensor.device.__get__),  # type: ignore[attr-defined]
        *(Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
    }
)
"""What is known of a result without computing it."""


def compute_rows_as_read(layer: nn.Linear) -> Callable[[], None]:
    """Have a linear layer compute only those rows of its results that are read.

    What it returns is right in any use; it is faster where rows are read by a slice or an index, once or twice. Weights that an
    optimizer changes before the rest of the rows is read are saved for that.

    Returns:
        A function that puts back what was there before.

    Raises:
        UsageError: The layer is no nn.Linear.
    """
    if not isinstance(layer, nn.Linear):
        raise UsageError(f"{type(layer).__name__} is no nn.Linear; pass the linear layer whose rows are read in part")
    return replace_forward(layer, lambda input: late_rows(layer, input))


def late_rows(layer: nn.Linear, source: Tensor) -> Tensor:
    """The rows of `layer(source)`, computed when they are read; at once where that cannot wait (compiling, inference mode)."""
    is_plain = type(source) is Tensor and source.dim() > 1 and not source.is_sparse
    if (
        not is_plain
        or torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or torch._C._get_tracing_state() is not None
    ):
        return F.linear(source, layer.weight, layer.bias)
    _save_weights_before_steps()
    return _LateRows(layer, source)


class _LateRows(Tensor):
    """Results of a linear layer [..., outputs] that are not computed yet."""

    _layer: nn.Linear
    _source: Tensor
    _source_version: int
    _weights: tuple[Tensor, Tensor | None] | None
    _all: Tensor | None
    _num_reads: int
    _has_grad: bool
    _autocast: tuple[str, torch.dtype] | None

    @staticmethod
    def __new__(cls, layer: nn.Linear, source: Tensor) -> _LateRows:
        device = source.device.type
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else source.dtype
        needs = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (source, layer.weight, layer.bias)
        )
        shape = (*source.shape[:-1], layer.out_features)
        self: _LateRows = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=source.device, requires_grad=needs
        )
        self._layer, self._source, self._source_version = layer, source, source._version
        self._weights, self._all, self._num_reads = None, None, 0
        self._has_grad = torch.is_grad_enabled()
        self._autocast = (device, dtype) if is_autocast else None
        _late.add(self)
        if needs:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return self

    def __init__(self, layer: nn.Linear, source: Tensor) -> None:
        """Everything is done in __new__."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, _LateRows):
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.contiguous and len(args) == 1 and not kwargs:
                return first
            if func is Tensor.__getitem__ and reads_rows(args[1], first.dim()):
                return first.rows(args[1])
        args, kwargs = tree_map_only(_LateRows, _LateRows.all_rows, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_LateRows, _LateRows.all_rows, (args, kwargs or {}))
        return func(*args, **kwargs)

    def rows(self, index: Any) -> Tensor:
        """The rows at an index that leaves the outputs as they are."""
        self._num_reads += 1
        if self._all is not None or self._num_reads > _MOST_READS:
            return self.all_rows()[index]
        return self._computed(self._source[index])

    def all_rows(self) -> Tensor:
        """All rows, computed once."""
        if self._all is None:
            self._all = self._computed(self._source)
        return self._all

    def save_weights(self) -> None:
        """Save the weights, which are about to change, for rows that are read later."""
        if self._all is None and self._weights is None:
            bias = self._layer.bias
            self._weights = (self._layer.weight.detach().clone(), None if bias is None else bias.detach().clone())

    def _computed(self, source: Tensor) -> Tensor:
        if self._source._version != self._source_version:
            raise UsageError(
                "the input of a linear layer was changed in place before all rows of its result were read; "
                "take compute_rows_as_read off this layer"
            )
        weight, bias = self._weights or (self._layer.weight, self._layer.bias)
        with _as_when_called(self._has_grad, self._autocast):
            return F.linear(source, weight, bias)


def _refuse_gradient(gradient: Tensor) -> None:
    """What goes around __torch_function__ (a custom autograd.Function) has no way from here to the layer's own graph."""
    raise UsageError(
        "a gradient came for rows that were never read by an index or an operator of torch; take compute_rows_as_read off "
        "this layer"
    )


_late: weakref.WeakSet[_LateRows] = weakref.WeakSet()


@contextmanager
def _as_when_called(has_grad: bool, autocast: tuple[str, torch.dtype] | None) -> Iterator[None]:
    """Gradients and autocast as they were when the layer was called."""
    device, dtype = autocast or ("cpu", torch.bfloat16)
    with torch.set_grad_enabled(has_grad), torch.autocast(device, dtype, enabled=autocast is not None):
        yield


@cache
def _save_weights_before_steps() -> None:
    """Once: before any optimizer steps, results that are still alive save the weights."""

    def save(*_: object) -> None:
        for late in list(_late):
            late.save_weights()

    register_optimizer_step_pre_hook(save)


def reads_rows(index: Any, dim: int) -> bool:
    """Whether an index into a tensor of so many dimensions leaves the last one whole.

    >>> reads_rows((slice(None), -1), 3), reads_rows((..., 0), 3), reads_rows((..., -1, slice(None)), 3)
    (True, False, True)
    """
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or isinstance(part, (list, str)) for part in parts):
        return False
    taken = [
        part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else int(part is not ...) for part in parts
    ]
    if any(part is ... for part in parts):
        place = next(i for i, part in enumerate(parts) if part is ...)
        behind = sum(taken[place + 1 :])
        return (behind == 0 and sum(taken) < dim) or (behind > 0 and _is_whole(parts[-1]) and sum(taken) <= dim)
    return sum(taken) < dim or (sum(taken) == dim and _is_whole(parts[-1]))


def _is_whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)
