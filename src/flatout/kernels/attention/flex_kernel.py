"""FlexAttention with block lists out of the mask's structure: every mask and score on a GPU in one kernel a direction."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.attention import flex, flex_lists
from flatout.kernels.attention.blocks import block_lists
from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.scores import Score
from flatout.records.kernel import Kernel

_LARGEST_TILE: Final = 128
"""No kernel of FlexAttention has larger tiles."""
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    key = ("flex", q.size(2), k.size(2), q.device)
    block_mask = mask.keep(key, lambda: _prepared(mask, q, k))
    flex.mark_lengths(q, k, v, block_mask)
    is_whole = q.size(2) % _LARGEST_TILE == 0 and k.size(2) % _LARGEST_TILE == 0
    kind = (
        mask.signature,
        mask.is_formula,
        mask.batch > 1,
        mask.heads > 1,
        score.signature if score else None,
        is_whole,
    )
    # where lengths are no constants of what is compiled, torch guards every load: a causal softcap of 16 k tokens took 14.8 ms
    # forward and backward, and without 12.6; without looking up the next block's place either, 11.4 (H200)
    options = _options(q, score)
    if is_whole:
        options |= {"IS_DIVISIBLE": True, "BLOCKS_ARE_CONTIGUOUS": mask.has_contiguous_blocks}
    return flex.attend(q, k, v, kind=kind, block_mask=block_mask, score=score, scale=scale, options=options)


def _options(q: Tensor, score: Score | None) -> dict[str, Any]:
    """How the kernels are laid out where torch's choice is not the best, or does not fit (measured on an H200)."""
    if score is None:
        return {}
    if score.tensors:
        # what is gathered for each pair goes through shared memory too: three stages of it and of the keys are more than there is
        return {"num_stages": 2}
    if q.dtype != torch.float32 and q.size(3) == 128:
        # arithmetic between the products: 3.2 ms with torch's tiles, 3.0 ms with these, softcap, causal, 16 k tokens, 16 heads
        return {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 3}
    return {}


def _prepared(mask: Mask, q: Tensor, k: Tensor) -> Any:
    lists = block_lists(mask, q.size(2), k.size(2))
    mod = mask.to(q.device).mod() if mask.is_formula else flex_lists.bits_mod(mask, lists, q.device)
    return flex_lists.block_mask(lists, mod, q.device)


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}: it has a backward pass on CUDA devices alone"
    if q.dtype not in _DTYPES:
        return f"{q.dtype} is none of {', '.join(map(str, _DTYPES))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if q.size(3) < 16 or v.size(3) < 16:
        return f"widths of {q.size(3)} and {v.size(3)}; it takes 16 and more"
    return None


KERNEL = Kernel(
    id="attention.flex",
    op="attention",
    title="FlexAttention with block lists from the mask's structure",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=30,
)
