"""FlexAttention with our block lists, compiled once for each kind of mask and score, whatever the lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.attention.scores import Score

_DYNAMIC: Final = {"kv_num_blocks": (2,), "kv_indices": (2, 3), "q_num_blocks": (2,), "q_indices": (2, 3)}


@cache
def compiled(kind: Hashable) -> Callable[..., Tensor]:
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


def mark_lengths(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> None:
    """Sizes that change from call to call, told to torch.compile before the first, so that it compiles once."""
    for tensor in (q, k, v):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    for name, dims in _DYNAMIC.items():
        for prefix in ("", "full_"):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(getattr(block_mask, prefix + name), dim)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: Hashable,
    block_mask: Any,
    score: Score | None,
    scale: float,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """(B, H, Q, E)."""
    score_mod = score.mod(is_scaled=True) if score is not None else None
    scale = scale if score is None or score.scaled is None else scale * score.scaled.share
    return compiled(kind)(q, k, v, score_mod, block_mask, scale, k.size(1) != q.size(1), options)
