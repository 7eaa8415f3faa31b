"""On a CPU: the blocks that there are, forward and backward, where FlexAttention has no backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.attention import sparse_cpu
from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.pieces import pieces_of
from flatout.kernels.attention.scores import Score
from flatout.records.kernel import Kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    key = ("pieces", q.size(2), k.size(2), score is None and q.size(3) == v.size(3))

    pieces = mask.keep(key, lambda: pieces_of(mask, q.size(2), k.size(2), is_tiled=not key[3]))
    return sparse_cpu.attend(q, k, v, pieces=pieces, score=score, scale=scale)


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    if q.device.type != "cpu":
        return f"the tensors are on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"{q.dtype} is none of {', '.join(map(str, _DTYPES))}"
    return None


KERNEL = Kernel(
    id="attention.pieces",
    op="attention",
    title="torch's CPU kernel on the blocks that are seen, joined by log-sum-exp",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=10,
)
