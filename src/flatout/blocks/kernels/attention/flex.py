"""FlexAttention with block lists out of the mask's structure: every mask and score on a GPU in one kernel a direction.

It is compiled once for each kind of mask and score, whatever the lengths. Lists are no wider than the longest row, and masks that
are no formula are bits.
"""

# B batch, H heads, R rows of blocks, C columns of blocks, W blocks of the longest row, N blocks that there are

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.blocks import BlockLists, block_lists, dense_tiles
from flatout.blocks.kernels.attention.mask import Mask, MaskMod, Sizes, sent
from flatout.blocks.kernels.attention.scores import Score
from flatout.core.parts import kernel

_LARGEST_TILE: Final = 128
"""No kernel of FlexAttention has larger tiles."""
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_DYNAMIC: Final = {"kv_num_blocks": (2,), "kv_indices": (2, 3), "q_num_blocks": (2,), "q_indices": (2, 3)}
_WORD: Final = 32


@cache
def compiled_flex_attention(kind: Hashable) -> Callable[..., Tensor]:
    """FlexAttention for masks and scores of one kind.

    torch.compile counts recompilations by code object, and gives up after 8: each kind gets a code object of its own.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool, options: Any
    ) -> Any:
        return flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa=enable_gqa, kernel_options=options)

    code = attend.__code__.replace(co_name=f"attend_{abs(hash(kind)):x}")
    own = FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
    function: Callable[..., Tensor] = torch.compile(own, fullgraph=True, backend=_inductor)
    return function


def _inductor(graph: Any, inputs: Any) -> Any:
    """Inductor, without its use of saved tensors as memory for results, which would forbid a second backward pass.

    torch's switch for it (`donated_buffer`) leaves out what it should leave empty, so that torch 2.11 to 2.13 refuse the second
    pass all the same, unless it was announced at the first one; and a compilation from torch's cache may come from where it was
    on.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor.compile_fx import compile_fx

    collect = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_: []
    try:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs)
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = collect


def declare_dynamic_lengths(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> None:
    """Sizes that change from call to call, told to torch.compile before the first, so that it compiles once."""
    for tensor in (q, k, v):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    for name, dims in _DYNAMIC.items():
        for prefix in ("", "full_"):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(getattr(block_mask, prefix + name), dim)


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    key = ("flex", q.size(2), k.size(2), q.device)
    lists = mask.keep(key, lambda: _prepared(mask, q, k))
    declare_dynamic_lengths(q, k, v, lists)
    is_whole = q.size(2) % _LARGEST_TILE == 0 and k.size(2) % _LARGEST_TILE == 0
    differs = (mask.batch > 1, mask.heads > 1)
    kind = (mask.signature, mask.is_formula, *differs, score.signature if score else None, is_whole)
    # where lengths are no constants of what is compiled, torch guards every load: a causal softcap of 16 k tokens took 14.8 ms
    # forward and backward, and without 12.6; without looking up the next block's place either, 11.4 (H200)
    options = _options(q, score)
    if is_whole:
        options |= {"IS_DIVISIBLE": True, "BLOCKS_ARE_CONTIGUOUS": mask.has_contiguous_blocks}
    score_mod = score.mod(is_scaled=True) if score is not None else None
    scale = scale if score is None or score.scaled is None else scale * score.scaled.share
    return compiled_flex_attention(kind)(q, k, v, score_mod, lists, scale, k.size(1) != q.size(1), options)


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
    mod = mask.to(q.device).mod() if mask.is_formula else bits_mod(mask, lists, q.device)
    return block_mask(lists, mod, q.device)


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


class Side(NamedTuple):
    """Numbers of blocks of each row, (B, H, R), and their columns, (B, H, R, W); int32. What lies beyond a row's number is 0."""

    num: Tensor
    which: Tensor


def sides(lists: BlockLists) -> tuple[Side, Side, Side, Side]:
    """Partial and full blocks by rows of queries, then partial and full ones by columns of keys."""
    by_row = _pair(lists.row, lists.col, lists.is_full, (lists.batch, lists.heads, lists.num_rows))
    group, row = lists.row // lists.num_rows, lists.row % lists.num_rows
    by_col, order = (group * lists.num_cols + lists.col).sort(stable=True)
    by_col_shape = (lists.batch, lists.heads, lists.num_cols)
    return by_row + _pair(by_col, row[order], lists.is_full[order], by_col_shape)


def _pair(row: Tensor, col: Tensor, is_full: Tensor, shape: tuple[int, int, int]) -> tuple[Side, Side]:
    """Partial and full blocks of each row: (N,) rows, numbered through samples and heads and sorted, and (N,) columns.

    W is that of the longest row of the two, since FlexAttention's kernels read both with the strides of one; rounded up to a
    power of two, so that masks of many lengths have few shapes, and at least 2: torch.compile takes 0 and 1 for constants.
    """
    num_rows = shape[0] * shape[1] * shape[2]
    kinds = [(row[kind], col[kind]) for kind in (~is_full, is_full)]
    nums = [rows.bincount(minlength=num_rows) for rows, _ in kinds]
    longest = max((int(num.max()) for num in nums if num.numel()), default=0)
    width = max(2, 1 << max(0, longest - 1).bit_length())
    partial, full = (_side(*kind, num, shape, width) for kind, num in zip(kinds, nums, strict=True))
    return partial, full


def _side(row: Tensor, col: Tensor, num: Tensor, shape: tuple[int, int, int], width: int) -> Side:
    first = num.cumsum(0) - num
    place = torch.arange(col.numel(), device=col.device) - first[row]
    # tensors of their own and no views, whose bases torch.compile would look at too
    index = torch.zeros(*shape, width, dtype=torch.int32, device=col.device)
    index.view(-1, width)[row, place] = col.to(torch.int32)
    counts = torch.zeros(shape, dtype=torch.int32, device=col.device)
    counts.view(-1).copy_(num)
    return Side(counts, index)


def block_mask(lists: BlockLists, mod: MaskMod, device: torch.device) -> Any:
    """A torch BlockMask, there. Lists on the CPU are copied from pinned memory, and nobody waits."""
    from torch.nn.attention.flex_attention import BlockMask

    by_row, full_by_row, by_col, full_by_col = (Side(*(sent(t, device) for t in s)) for s in sides(lists))
    return BlockMask(
        seq_lengths=(lists.queries, lists.keys),
        kv_num_blocks=by_row.num,
        kv_indices=by_row.which,
        full_kv_num_blocks=full_by_row.num,
        full_kv_indices=full_by_row.which,
        q_num_blocks=by_col.num,
        q_indices=by_col.which,
        full_q_num_blocks=full_by_col.num,
        full_q_indices=full_by_col.which,
        BLOCK_SIZE=(lists.block, lists.block),
        mask_mod=mod,
    )


def bits_mod(mask: Mask, lists: BlockLists, device: torch.device) -> MaskMod:
    """The mask as bits of its partial blocks, looked up: for masks that are no formula of their indices.

    Takes block^2 / 8 bytes for each partial block, 2 KiB of 128, and 4 bytes for each block that could be.
    """
    sizes = Sizes(lists.batch, lists.heads, lists.queries, lists.keys, lists.row.device)
    partial = (~lists.is_full).nonzero().squeeze(1)
    block = lists.block
    words = torch.zeros(partial.numel() + 1, block, block // _WORD, dtype=torch.int32, device=sizes.device)
    weights = (1 << torch.arange(_WORD, device=sizes.device)).to(torch.int64)
    step = max(1, (1 << 22) // block**2)
    for at in range(0, partial.numel(), step):
        which = partial[at : at + step]
        visible = dense_tiles(mask, sizes, block, lists.row[which], lists.col[which])
        packed = (visible.unflatten(-1, (-1, _WORD)) * weights).sum(-1)
        # the 32nd bit becomes the sign, which shifting brings back
        words[1 + at : 1 + at + step] = packed.to(torch.int32)
    num_rows = lists.batch * lists.heads * lists.num_rows
    word_indices = torch.zeros(num_rows, lists.num_cols, dtype=torch.int32, device=sizes.device)
    numbers = torch.arange(1, partial.numel() + 1, dtype=torch.int32, device=sizes.device)
    word_indices[lists.row[partial], lists.col[partial]] = numbers
    word_indices = sent(word_indices.view(lists.batch, lists.heads, lists.num_rows, lists.num_cols), device)
    words = sent(words, device)
    by_sample, by_head = lists.batch > 1, lists.heads > 1

    def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        word_index = word_indices[b if by_sample else 0 * b, h if by_head else 0 * h, q // block, kv // block]
        word = words[word_index, q % block, (kv % block) // _WORD]
        return ((word >> (kv % _WORD)) & 1) == 1

    return function


KERNEL = kernel(__name__, "FlexAttention with block lists from the mask's structure", _run, order=30, refusal=_refusal)
