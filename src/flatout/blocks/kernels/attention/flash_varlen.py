"""PyTorch's FlashAttention-2 on tokens that lie behind one another, with documents and a window: no padding, no block lists."""

# T tokens of all samples, H heads, G key heads, D width

from __future__ import annotations

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.sdpa import half_refusal
from flatout.blocks.kernels.attention.spans import SpanOptions, attend_on_samples
from flatout.blocks.kernels.attention.structures import band_of
from flatout.core.parts import kernel

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def _window(options: SpanOptions) -> dict[str, int]:
    """The bounds as the kernel takes them: none where it is causal."""
    if options.is_causal:
        return {}
    left, right = (-1 if bound is None else bound for bound in (options.left, options.right))
    return {"window_size_left": left, "window_size_right": right}


def flash_forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: SpanOptions) -> tuple[Tensor, Tensor]:
    """The result (T, H, D), and the logsumexp of each head's and token's scores, (H, T) float32."""
    (offsets, longest), is_causal = options.spans, options.is_causal
    sizes = (offsets, offsets, longest, longest)
    out, lse, *_ = _forward(q_THD, k_TGD, v_TGD, *sizes, 0.0, is_causal, False, scale=options.scale, **_window(options))
    return out, lse


def flash_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    options: SpanOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    offsets, longest = options.spans
    # nothing is dropped, so that the state of random numbers is not read (as in torch.nn.attention.varlen)
    rng = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    tensors = (grad_THD.contiguous(), q_THD, k_TGD, v_TGD, out_THD, lse_HT, offsets, offsets)
    state = (longest, longest, 0.0, options.is_causal, rng, q_THD.new_empty(0))
    grads: tuple[Tensor, Tensor, Tensor] = _backward(*tensors, *state, scale=options.scale, **_window(options))
    return grads


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    return attend_on_samples(q, k, v, mask, scale, flash_forward, flash_backward)


def refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    """Why the kernel cannot be taken; None if it can."""
    why = tensor_refusal(q, k, v, score=score)
    if why is not None:
        return why
    if band_of(mask) is None:
        return f"{mask!r} is more than a window within documents that lie behind one another"
    if q.size(2) != k.size(2):
        return f"there are {q.size(2)} queries and {k.size(2)} keys"
    return None


def tensor_refusal(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None = None) -> str | None:
    """Why the kernel cannot take such tensors on their device, whatever the mask; None if it can."""
    why = half_refusal(q, k, v, score=score, widest=256)
    if why is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return why


KERNEL = kernel(
    __name__,
    "FlashAttention-2 on tokens that lie behind one another",
    _run,
    order=16,
    refusal=refusal,
    name="flash-varlen",
)
