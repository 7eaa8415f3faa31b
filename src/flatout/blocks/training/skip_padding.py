"""A model that computes its linear layers, norms and activations of real tokens alone, and pads where positions matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.blocks.training.packed_graphs import Backend, packing
from flatout.blocks.training.packed_rows import labelled_tokens, packed_rows
from flatout.core.errors import UsageError
from flatout.core.tensors.nests import map_tensors, tensors_in


def skip_padding(
    model: nn.Module,
    *,
    pad: int = 0,
    multiple: int = 256,
    fused: bool = True,
    options: dict[str, Any] | None = None,
) -> Callable[[], None]:
    """Have a model on padded tokens [B, T] compute what is made of each token alone without the padding.

    The model is compiled by `torch.compile` at its first call. In its graphs embeddings, linear layers, norms and pointwise
    functions are computed of the tokens that are not `pad`, packed one behind the other and filled up to a `multiple`, so that
    few sizes come. What reads other positions, such as attention, gets padded arrays, with zeros where padding is. So results
    of padding are zeros, where they were numbers that nobody should read: a model that does read them, by a mean over all
    positions, computes something else, which is for you to know (or for `flatout verify` to tell). Dropout is drawn for padding
    as before, so that the random numbers stay the same.

    The first tensor of integers with two dimensions among the arguments is taken for the tokens; a call without any is computed
    as before. On a device the host waits for the number of real tokens in each call. Where no product can leave padding out,
    as where rows are as long as there are heads, a warning says so, and results are right all the same.

    Args:
        model: Any module; its `forward` is what is compiled.
        pad: The token that stands for nothing.
        multiple: What the number of packed rows is rounded up to.
        fused: Whether Inductor compiles the rest; without, operators run one by one, on packed rows.
        options: Switches of Inductor, as `torch.compile` takes them.

    Returns:
        A function that puts back what was there before.

    Raises:
        UsageError: The model is compiled already, or the multiple is less than 1.
    """
    if model._compiled_call_impl is not None:
        raise UsageError("the model is compiled already; call skip_padding instead of model.compile")
    if multiple < 1:
        raise UsageError(f"multiple {multiple} must be at least 1")
    model._compiled_call_impl = packed_call(model, pad=pad, multiple=multiple, fused=fused, options=options)

    def undo() -> None:
        model._compiled_call_impl = None

    return undo


def packed_call(
    model: nn.Module, *, pad: int, multiple: int, fused: bool = True, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The model's call as `skip_padding` makes it; the model is left as it is."""

    def labelled(index: Tensor, inverse: Tensor, args: Any, kwargs: Any) -> Any:
        tokens = _tokens(args, kwargs)
        args, kwargs = map_tensors((args, kwargs), lambda t: labelled_tokens(t, index, inverse) if t is tokens else t)
        return model._call_impl(*args, **kwargs)

    labelled.__code__ = labelled.__code__.replace()  # Dynamo counts compilations by code: each model has its own
    compiled = torch.compile(labelled, backend=packing(_inductor(options or {}) if fused else _one_by_one))

    def call(*args: Any, **kwargs: Any) -> Any:
        tokens = _tokens(args, kwargs)
        if tokens is None or torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)
        index, inverse = packed_rows(tokens, pad=pad, multiple=multiple)
        torch._dynamo.maybe_mark_dynamic(index, 0)
        return compiled(index, inverse, args, kwargs)

    return call


def _tokens(args: Any, kwargs: Any) -> Tensor | None:
    """The first integers of two dimensions."""
    found = (t for t in tensors_in((args, kwargs)) if t.dim() == 2 and t.dtype in (torch.int64, torch.int32))
    return next(found, None)


def _inductor(options: dict[str, Any]) -> Backend:
    from torch._inductor.compile_fx import compile_fx

    backend: Any = partial(compile_fx, config_patches=options)
    return backend  # type: ignore[no-any-return]


def _one_by_one(graph: Any, inputs: Any) -> Callable[..., Any]:
    forward: Callable[..., Any] = graph.forward
    return forward
