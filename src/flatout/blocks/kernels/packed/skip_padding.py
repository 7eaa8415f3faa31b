"""A model that computes its layers of real tokens alone, and pads where positions matter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatout.blocks.kernels.packed.graphs import Backend, packing
from flatout.blocks.kernels.packed.rows import RowPlaces, labelled_mask, labelled_tokens, packed_rows
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
    few sizes come. So is attention without dropout where real tokens see all real ones of their row, or those before them: it is
    causal and padding lies behind, or its mask hides the padding and nothing else, which is tried on many patterns of padding
    when the model is compiled. The mask may be made of the tokens, or of a mask [B, T] among the arguments that is 1 where tokens
    are real. On a GPU FlashAttention takes it, in 16 bits.

    What else reads other positions gets padded arrays, with zeros where padding is. So results of padding are zeros, where they
    were numbers that nobody should read: a model that does read them, by a mean over all positions, computes something else,
    which is for you to know (or for `flatout verify` to tell). Dropout is drawn for padding as before, so that the random numbers
    stay the same.

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

    def labelled(places: RowPlaces, masks: tuple[int, ...], args: Any, kwargs: Any) -> Any:
        tokens, others = _tokens(args, kwargs)
        shown = [others[number] for number in masks]

        def label(t: Tensor) -> Any:
            if t is tokens:
                return labelled_tokens(t, *places)
            return labelled_mask(t, *places[:2]) if any(t is mask for mask in shown) else t

        args, kwargs = map_tensors((args, kwargs), label)
        return model._call_impl(*args, **kwargs)

    labelled.__code__ = labelled.__code__.replace()  # Dynamo counts compilations by code: each model has its own
    compiled = torch.compile(labelled, backend=packing(_inductor(options or {}) if fused else _one_by_one, pad=pad))

    def call(*args: Any, **kwargs: Any) -> Any:
        tokens, others = _tokens(args, kwargs)
        if tokens is None or torch.compiler.is_compiling():
            return model._call_impl(*args, **kwargs)
        places = packed_rows(tokens, pad=pad, multiple=multiple)
        torch._dynamo.maybe_mark_dynamic(places.index_N, 0)
        is_real = places.inverse_BT >= 0
        masks = tuple(number for number, mask in enumerate(others) if torch.equal(mask, is_real.to(mask.dtype)))
        return compiled(places, masks, args, kwargs)

    return call


def _tokens(args: Any, kwargs: Any) -> tuple[Tensor | None, list[Tensor]]:
    """The first integers of two dimensions, and what else has numbers for them that may say which are real."""
    whole = [t for t in tensors_in((args, kwargs)) if t.dim() == 2 and not t.dtype.is_complex]
    tokens = next((t for t in whole if t.dtype in (torch.int64, torch.int32)), None)
    if tokens is None:
        return None, []
    shape = tokens.shape
    return tokens, [t for t in whole if t is not tokens and t.shape == shape and t.device == tokens.device]


def _inductor(options: dict[str, Any]) -> Backend:
    from torch._inductor.compile_fx import compile_fx

    backend: Any = partial(compile_fx, config_patches=options)
    return backend  # type: ignore[no-any-return]


def _one_by_one(graph: Any, inputs: Any) -> Callable[..., Any]:
    forward: Callable[..., Any] = graph.forward
    return forward
