"""Operators of our own that torch.compile takes whole: no graph break, no look inside.

The lowest are `opaque`: an implementation and one that only tells shapes. Above them stands the differentiable Python code that
chooses a kernel and runs it; as a `composed` operator it is called when the graph is made, with tensors that have shapes but no
numbers, and what it calls comes into the graph. In eager mode that code is called straight, without the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_LIBRARY: Final = torch.library.Library("flatout", "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(schema: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `torch.ops.flatout.<name>` of this schema, its gradient none of PyTorch's business.

    `shapes` takes the same arguments and returns tensors of the right shapes, dtypes and devices. What is decorated becomes the
    operator, so that it is recorded by whoever records.
    """

    def registered(implementation: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flatout::{name}", shapes, lib=_LIBRARY)
        operator: Callable[..., Any] = getattr(torch.ops.flatout, name).default
        return operator

    return registered


def composed(schema: str) -> Callable[[Function], Function]:
    """A decorator: `torch.ops.flatout.<name>` of this schema besides; what is decorated stays as it is."""

    def registered(implementation: Function) -> Function:
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], implementation, "CompositeImplicitAutograd")
        return implementation

    return registered
