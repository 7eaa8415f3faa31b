"""Masks to be joined by `&`, `|` and `~`: `flatout.masks.causal() & flatout.masks.documents(offsets)`.

Queries and keys are counted from 0, each from the beginning of its own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.blocks.kernels.attention import graphs, structures
from flatout.blocks.kernels.attention.mask import Mask, MaskMod, Stacked
from flatout.core.errors import UsageError


def everything() -> Mask:
    """A mask that shows every key. `~everything()` is none."""
    return structures.Everything()


def causal() -> Mask:
    """The query's own place and the keys before it."""
    return structures.Window(None, 0)


def window(left: int | Tensor | None, right: int | Tensor | None = 0) -> Mask:
    """`left` keys before the query's place, its own, and `right` after it; None for all on that side.

    By sample or head with integer tensors of shape (1 or B, 1 or H).

    >>> window(1).dense(4, 4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    return structures.Window(left, right)


def documents(offsets: Tensor | Sequence[int] | None = None, *, ids: Tensor | None = None) -> Mask:
    """The keys of the query's own document.

    `offsets` (N + 1,), as a Ragged has them: document i is the tokens offsets[i] to offsets[i + 1] - 1, the first begins at 0 and
    the last ends where the sequence does. Or `ids` (S,) or (B, S): tokens of equal number belong together; documents that lie
    behind one another are found and taken as such. Offsets on a GPU are copied to the host, which waits for them.

    >>> documents([0, 2, 3]).dense(3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    if (offsets is None) == (ids is None):
        raise UsageError("give either the offsets of documents or the document's number of each token as ids")
    if ids is not None:
        if ids.dim() not in (1, 2) or ids.is_floating_point():
            raise UsageError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; give integers (S,) or (B, S)")
        return structures.Documents(
            ids, offsets=_offsets_of(ids) if ids.dim() == 1 and ids.device.type == "cpu" else None
        )
    bounds = torch.as_tensor(offsets).to("cpu", torch.int64)
    if bounds.dim() != 1 or not bounds.numel() or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise UsageError(f"offsets of shape {tuple(bounds.shape)} must begin with 0 and never fall")
    bounds = torch.cat([bounds[:1], bounds[1:][bounds.diff() > 0]])  # a document without tokens is none
    return structures.Documents(None, offsets=bounds)


def prefix(length: int | Tensor) -> Mask:
    """The first `length` keys: `causal() | prefix(n)` sees a prompt both ways. By sample or head with (1 or B, 1 or H)."""
    return _leading(length, "prefix")


def sinks(num: int | Tensor) -> Mask:
    """The first `num` keys, which streaming attention keeps in sight: `window(1023) | sinks(4)`, with `& causal()`."""
    return _leading(num, "sinks")


def global_tokens(is_global: Tensor) -> Mask:
    """Tokens that see everything and that everything sees: (S,), bool."""
    if is_global.dim() != 1 or is_global.dtype != torch.bool:
        raise UsageError(f"global tokens are {is_global.dtype} of shape {tuple(is_global.shape)}; give bool (S,)")
    return structures.Global(is_global)


def dilated(step: int) -> Mask:
    """Every `step`th key before and after the query."""
    if step < 1:
        raise UsageError(f"step is {step}; give 1 or more")
    return structures.Dilated(step)


def blocks(layout: Tensor, size: int) -> Mask:
    """Squares of `size` queries by `size` keys where `layout` is true: (queries / size, keys / size), (H, ...) or (B, H, ...)."""
    if size < 1 or layout.dtype != torch.bool or layout.dim() not in (2, 3, 4):
        raise UsageError(
            f"a layout of {layout.dtype}, shape {tuple(layout.shape)} and squares of {size}; give bool, 2 to 4 dims"
        )
    return structures.Blocks(layout.reshape((1,) * (4 - layout.dim()) + layout.shape), size)


def tree(parents: Tensor | Sequence[int]) -> Mask:
    """Itself and its ancestors: parents (S,), -1 for a root. Of many continuations of one prompt, say.

    >>> tree([-1, 0, 0, 2]).dense(4, 4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    """
    return graphs.tree_of(torch.as_tensor(parents))


def graph(crow: Tensor, col: Tensor, *, num_keys: int | None = None) -> Mask:
    """The query's neighbours, from the rows of a CSR matrix: `crow` (Q + 1,), `col` (E,). `| window(0, 0)` adds the query itself.

    `num_keys` where there are not as many keys as queries.

    >>> graph(torch.tensor([0, 2, 3, 3]), torch.tensor([0, 2, 1])).dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    """
    return graphs.graph_of(crow, col, num_keys)


def custom(function: MaskMod, *, batch: int = 1, heads: int = 1) -> Mask:
    """Any function of (batch, head, query, key), index tensors that broadcast, to bool: what FlexAttention calls a mask_mod.

    `batch` and `heads` where it tells samples or heads apart. Nothing is known about it, so that every block has to be looked at,
    one row of blocks after the other; joined with a structure by `&`, only the blocks that this lets through.
    """
    return structures.Custom(function, batch=batch, heads=heads)


def per_head(masks: Sequence[Mask]) -> Mask:
    """The mask of each head. Where only numbers differ, one `window` or `prefix` with a tensor is faster on a GPU."""
    return Stacked(masks, by="heads")


def per_sample(masks: Sequence[Mask]) -> Mask:
    """The mask of each sample of the batch."""
    return Stacked(masks, by="batch")


def _offsets_of(ids: Tensor) -> Tensor | None:
    """Of documents that lie behind one another; None where one comes back after another."""
    names, lengths = ids.unique_consecutive(return_counts=True)
    if names.unique().numel() < names.numel():
        return None
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _leading(length: int | Tensor, name: str) -> Mask:
    num = torch.as_tensor(length)
    num = num.reshape(1, 1) if num.dim() == 0 else num
    if num.dim() != 2 or num.is_floating_point():
        raise UsageError(
            f"{name} of {num.dtype} and shape {tuple(num.shape)}; give a number or integers (1 or B, 1 or H)"
        )
    return structures.Leading(num.to(torch.int32), name=name)
