"""Operators of our own that torch.compile takes whole: no graph break, no look inside.

The lowest are `opaque`: an implementation and one that only tells shapes. Above them stands the differentiable Python code that
chooses a kernel and runs it; as a `composed` operator it is called when the graph is made, with tensors that have shapes but no
numbers, and what it calls comes into the graph. In eager mode that code is called straight, without the operator. Gradients are
made by code under `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from flatout.core.errors import UsageError

_LIBRARY: Final = torch.library.Library("flatout", "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., Any])
Backward = Callable[..., tuple[Tensor | None, ...]]
Side = Tensor | None
"""A tensor beside the main ones that may be left out: a bias, a weight, a residual, a scale."""


HOST_READS: Final[tuple[torch.Tag, ...]] = tuple(
    getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)
)
"""Tags of an operator that reads numbers of the device: Inductor records no CUDA graph over it (torch 2.9 and later)."""


def opaque(
    schema: str, shapes: Callable[..., Any], *, tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `torch.ops.flatout.<name>` of this schema, its gradient none of PyTorch's business.

    `shapes` takes the same arguments and returns tensors of the right shapes, dtypes and devices. What is decorated becomes the
    operator, so that it is recorded by whoever records.
    """

    def registered(implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=tuple(tags))
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flatout::{name}", shapes, lib=_LIBRARY)
        operator: Callable[..., Any] = getattr(torch.ops.flatout, name).default
        return operator

    return registered


def composed(schema: str) -> Callable[[Function], Function]:
    """A decorator: calls go to `torch.ops.flatout.<name>` of this schema where torch.compile records, else straight."""

    def registered(implementation: Function) -> Function:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, implementation, "CompositeImplicitAutograd")
        operator = getattr(torch.ops.flatout, name).default

        @wraps(implementation)
        def call(*args: Any, **options: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else implementation)(*args, **options)

        return call  # type: ignore[return-value]

    return registered


def with_dense_rows(t: Tensor) -> Tensor:
    """A tensor whose rows may lie at any distance, and the numbers of a row are neighbours: a copy where they were not."""
    return t if t.stride(-1) == 1 else t.contiguous()


def once(backward: Backward) -> Backward:
    """A decorator of the backward pass of an autograd function: it is not recorded, and differentiating its results
    raises UsageError.

    `torch.autograd.function.once_differentiable` raises only where the incoming gradient itself needs one; a penalty on the
    gradient of a plain loss would be taken for a constant without a word.
    """

    @wraps(backward)
    def guarded_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        return tuple(t if t is None else _NotAgain.apply(t.detach().requires_grad_()) for t in gradients)  # type: ignore[no-untyped-call]

    return guarded_backward


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise UsageError(
            "the gradient of a fused kernel is differentiated again, and it has no second one; "
            "name the reference, kernel='<operation>.reference', which has"
        )
