"""Attention on tokens of documents that lie behind one another, by the kernel for that: cuDNN's or FlashAttention-2."""

# T tokens of all samples, H heads, G key heads, D width

from __future__ import annotations

from torch import Tensor

from flatout.blocks.kernels.attention import cudnn_varlen
from flatout.blocks.kernels.attention.cudnn_varlen import cudnn_backward, cudnn_forward
from flatout.blocks.kernels.attention.flash_varlen import flash_backward, flash_forward
from flatout.blocks.kernels.attention.spans import SpanOptions


def varlen_forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: SpanOptions) -> tuple[Tensor, Tensor]:
    """The result (T, H, D), and (H, T) numbers of float32 that the backward pass of the same kernel wants."""
    run = flash_forward if cudnn_varlen.refusal(q_THD, k_TGD, v_TGD, options) else cudnn_forward
    return run(q_THD, k_TGD, v_TGD, options)


def varlen_backward(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, stats: Tensor, options: SpanOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    run = flash_backward if cudnn_varlen.refusal(q_THD, k_TGD, v_TGD, options) else cudnn_backward
    return run(grad_THD, q_THD, k_TGD, v_TGD, out_THD, stats, options)
