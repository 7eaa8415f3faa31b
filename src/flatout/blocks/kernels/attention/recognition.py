"""The structure behind a mask that was written out pair by pair: nothing hidden, causal, a window, documents, or few pairs seen.

A structure is told from the values alone and compared with all of them, so that it is the mask.
"""

# B samples or 1, H heads or 1, Q queries, K keys

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.attention import masks
from flatout.blocks.kernels.attention.mask import Mask

Kind = Literal["all-true", "causal", "window", "documents", "padding", "sparse", "bias", "other"]

HIDDEN: Final = -9e3
"""A score lowered by more than this is out of the softmax in every dtype. A mask of -1e4, as BERT's first code has it, is -9984
in bfloat16."""
_BLOCK: Final = 128
_SPARSE: Final = 0.5
"""Share of blocks with a pair that is seen, up to which it pays to skip the others."""


class Recognised(NamedTuple):
    """What a mask is, the share of pairs that it lets through, and the structure that does the same, if there is one."""

    kind: Kind
    share: float
    mask: Mask | None = None


def recognised(mask_QK: Tensor) -> Recognised:
    """The structure of a mask as scaled_dot_product_attention takes it, (..., Q, K) of at most four dimensions.

    Its numbers are bool, or added to scores.

    'padding' hides the same keys from all queries of a sample; 'bias' adds something else than 0 or a number that hides. A mask
    in which a query sees nothing has no structure here: what such a query gets depends on the kernel.
    """
    visible = mask_QK if mask_QK.dtype == torch.bool else mask_QK > HIDDEN
    share = float(visible.sum()) / max(1, visible.numel())  # a mean of floats would make an array four times as large
    if mask_QK.dtype != torch.bool and bool((mask_QK[visible] != 0).any()):
        return Recognised("bias", share)
    visible_BHQK = visible.reshape((1,) * (4 - visible.dim()) + visible.shape)
    first = visible_BHQK[0, 0]
    is_one = bool((visible_BHQK == first).all())
    if is_one and bool(first.all()):
        return Recognised("all-true", share, masks.everything())
    if bool((visible_BHQK == visible_BHQK[..., :1, :]).all()):
        return Recognised("padding", share)
    if not bool(visible_BHQK.any(dim=-1).all()):
        return Recognised("other", share)
    if first.size(0) == first.size(1):
        found = _band(first) if is_one else None
        found = found or _documents(visible_BHQK)
        if found is not None:
            return Recognised(found[0], share, found[1])
    if _share_of_blocks(visible_BHQK) > _SPARSE:
        return Recognised("other", share)
    return Recognised("sparse", share, _looked_up(visible_BHQK))


def _band(visible: Tensor) -> tuple[Kind, Mask] | None:
    """Causal, or so many keys before and after the query's own place."""
    place = torch.arange(visible.size(0), device=visible.device)
    distance = place[None, :] - place[:, None]
    inside = distance[visible]
    before, after = -int(inside.min()), int(inside.max())
    if not torch.equal(visible, (distance >= -before) & (distance <= after)):
        return None
    last = visible.size(0) - 1
    if before == last and after == 0:
        return "causal", masks.causal()
    return "window", masks.window(None if before == last else before, None if after == last else after)


def _documents(visible_BHQK: Tensor) -> tuple[Kind, Mask] | None:
    """Parts of each sample that see only themselves, all of it or what lies before."""
    if not bool((visible_BHQK == visible_BHQK[:, :1]).all()):
        return None
    visible = visible_BHQK[:, 0]
    part = visible.view(torch.uint8).argmax(dim=-1)
    same = part[:, :, None] == part[:, None, :]
    is_whole = torch.equal(visible, same)
    if not is_whole and not torch.equal(visible, same.tril()):
        return None
    ids = part[0].cpu() if part.size(0) == 1 else part
    same_document = masks.documents(ids=ids.to(torch.int32))
    return "documents", same_document if is_whole else same_document & masks.causal()


def _share_of_blocks(visible_BHQK: Tensor) -> float:
    flat = visible_BHQK.flatten(0, 1).float()
    return float(torch.nn.functional.max_pool2d(flat, _BLOCK, ceil_mode=True).mean())


def _looked_up(original_BHQK: Tensor) -> Mask:
    """The mask that is there, looked up for each pair in a copy."""
    visible_BHQK = original_BHQK.clone()
    batch, heads = visible_BHQK.shape[:2]
    by_sample, by_head = batch > 1, heads > 1

    def look_up(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found: Tensor = visible_BHQK[b if by_sample else 0 * b, h if by_head else 0 * h, q, kv]
        return found

    return masks.custom(look_up, batch=batch, heads=heads)
