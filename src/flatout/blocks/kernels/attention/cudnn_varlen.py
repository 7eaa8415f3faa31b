"""NVIDIA cuDNN's fused attention on tokens that lie behind one another, through its own front end (the package
nvidia-cudnn-frontend): PyTorch binds the kernel, but built a plan anew in each call (MHA.cpp, `*_nestedtensor`, as we read it).

Plans are kept by the number of tokens, and by powers of two of the number of documents and of the longest: what is missing up to
them are empty documents, and places that no query has.
"""

# T tokens of all samples, H heads, G key heads, D width, N documents up to the next power of two

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.cudnn_plans import (
    CudnnPlan,
    TensorLike,
    add_tensor,
    bounds_of,
    has_cudnn,
    new_graph,
    set_output,
)
from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.sdpa import half_refusal
from flatout.blocks.kernels.attention.spans import SpanOptions, attend_on_samples
from flatout.blocks.kernels.attention.structures import band_of
from flatout.core.parts import kernel

_OLDEST: Final = 91_000
"""The first version of cuDNN whose own tests have empty documents (test/python/sdpa of the front end)."""
_TOKENS: Final = 64
"""The backward pass of cuDNN reserves memory for tokens in such numbers."""
_WORTH_IT: Final = 1024
"""Tokens of the longest document: with 4096 of them cuDNN took 0.69 times as long as FlashAttention-2, forward and backward
(account_llama-documents_plan in bench/results/2026-12-01-h200 and 2026-11-30-h200); on short ones it was not measured."""
_FEWEST: Final = 8
_SHORTEST: Final = 128


class _Sizes(NamedTuple):
    """What a plan depends on."""

    device: torch.device
    dtype: torch.dtype
    num_tokens: int
    num_documents: int
    longest: int
    num_heads: int
    num_key_heads: int
    width: int
    left: int | None
    right: int | None
    scale: float
    is_deterministic: bool

    def like(self, num_heads: int, width: int, dtype: torch.dtype | None = None) -> TensorLike:
        """(T, heads, width) as cuDNN wants to hear of it: a batch of documents, each as long as the longest."""
        shape = (self.num_documents, num_heads, self.longest, width)
        return TensorLike(shape, (self.longest * num_heads * width, width, num_heads * width, 1), dtype or self.dtype)

    @property
    def queries(self) -> TensorLike:
        return self.like(self.num_heads, self.width)

    @property
    def keys(self) -> TensorLike:
        return self.like(self.num_key_heads, self.width)

    @property
    def stats(self) -> TensorLike:
        """The log-sum-exp of each token and head."""
        return self.like(self.num_heads, 1, torch.float32)

    @property
    def lengths(self) -> TensorLike:
        return TensorLike((self.num_documents, 1, 1, 1), (1, 1, 1, 1), torch.int32)

    @property
    def starts(self) -> TensorLike:
        return TensorLike((self.num_documents + 1, 1, 1, 1), (1, 1, 1, 1), torch.int64)


def refusal(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: SpanOptions) -> str | None:
    """Why cuDNN cannot be taken for these tokens; None if it can."""
    why = half_refusal(*(t[None] for t in (q_THD, k_TGD, v_TGD)), score=None, widest=128)
    return why or _other_refusal(q_THD.device, q_THD.size(0), options.spans.longest, options.left, options.right)


def _other_refusal(
    device: torch.device, num_tokens: int, longest: int, left: int | None, right: int | None
) -> str | None:
    if longest < _WORTH_IT:
        return f"no document has {_WORTH_IT} tokens, as those had on which it was measured"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU's compute capability is below 9.0, where it is no faster"
    if num_tokens % _TOKENS:
        return f"{num_tokens} tokens are no multiple of {_TOKENS}"
    if right != 0 and (left, right) != (None, None):
        return "it has no windows but those that end at the query"
    if not has_cudnn():
        return "nvidia-cudnn-frontend is not installed"
    if _version() < _OLDEST:
        return f"version {_version()} of cuDNN is older than {_OLDEST}"
    return None


@cache
def _version() -> int:
    import cudnn

    return int(cudnn.backend_version())


def cudnn_forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: SpanOptions) -> tuple[Tensor, Tensor]:
    """The result (T, H, D), and what the backward pass wants of the scores: T x H numbers of float32."""
    q_THD, k_TGD, v_TGD = (t.contiguous() for t in (q_THD, k_TGD, v_TGD))
    sizes, (starts, lengths) = _sizes(q_THD, k_TGD, options), _places(q_THD, k_TGD, options)
    out, stats = torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2][::-1], dtype=torch.float32)
    _forward_plan(sizes)(q_THD, k_TGD, v_TGD, lengths, *starts, out, stats)
    return out, stats


def cudnn_backward(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, stats: Tensor, options: SpanOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    grad_THD, q_THD, k_TGD, v_TGD = (t.contiguous() for t in (grad_THD, q_THD, k_TGD, v_TGD))
    sizes, (starts, lengths) = _sizes(q_THD, k_TGD, options), _places(q_THD, k_TGD, options)
    of_q, of_k, of_v = (torch.empty_like(t) for t in (q_THD, k_TGD, v_TGD))
    operands = (q_THD, k_TGD, v_TGD, lengths, *starts, out_THD, stats, grad_THD)
    _backward_plan(sizes)(*operands, of_q, of_k, of_v)
    return of_q, of_k, of_v


def _sizes(q: Tensor, k: Tensor, options: SpanOptions) -> _Sizes:
    (num_tokens, num_heads, width), (offsets, longest) = q.shape, options.spans
    return _Sizes(
        device=q.device,
        dtype=q.dtype,
        num_tokens=num_tokens,
        num_documents=_power_of_two(offsets.numel() - 1, _FEWEST),
        longest=_power_of_two(longest, _SHORTEST),
        num_heads=num_heads,
        num_key_heads=k.size(1),
        width=width,
        left=options.left,
        right=options.right,
        scale=options.scale,
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _power_of_two(number: int, least: int) -> int:
    """The next one from `number` on."""
    return max(least, 1 << (number - 1).bit_length())


def _places(q: Tensor, k: Tensor, options: SpanOptions) -> tuple[tuple[Tensor, ...], Tensor]:
    """Where documents start in the numbers of queries, of keys and of stats (N + 1,) int64, and their lengths (N,) int32."""
    offsets = options.spans.offsets
    num_missing = _power_of_two(offsets.numel() - 1, _FEWEST) + 1 - offsets.numel()
    offsets = torch.cat([offsets, offsets[-1:].expand(num_missing)])
    sizes = _sizes_of_tokens(q.device, q.size(1) * q.size(2), k.size(1) * k.size(2), q.size(1))
    return (sizes * offsets).unbind(), offsets.diff()


@cache
def _sizes_of_tokens(device: torch.device, *sizes: int) -> Tensor:
    """How many numbers a token has, (3, 1) int64: of queries, of keys, of stats."""
    return torch.tensor(sizes, dtype=torch.int64)[:, None].to(device)


@cache
def _forward_plan(sizes: _Sizes) -> CudnnPlan:
    graph = new_graph(sizes.device, sizes.dtype)
    q, k, v = (add_tensor(graph, like) for like in (sizes.queries, sizes.keys, sizes.keys))
    lengths, (of_q, of_k, of_stats) = add_tensor(graph, sizes.lengths), _starts(graph, sizes)
    for tensor, start in ((q, of_q), (k, of_k), (v, of_k)):
        tensor.set_ragged_offset(start)
    out, stats = graph.sdpa(
        q=q,
        k=k,
        v=v,
        generate_stats=True,
        attn_scale=sizes.scale,
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=lengths,
        **bounds_of(sizes.left, sizes.right),
    )
    for tensor, like, start in ((out, sizes.queries, of_q), (stats, sizes.stats, of_stats)):
        set_output(tensor, like)
        tensor.set_ragged_offset(start)
    return CudnnPlan(graph, (q, k, v, lengths, of_q, of_k, of_stats, out, stats))


@cache
def _backward_plan(sizes: _Sizes) -> CudnnPlan:
    graph = new_graph(sizes.device, sizes.dtype)
    likes = (sizes.queries, sizes.keys, sizes.keys, sizes.queries, sizes.queries, sizes.stats)
    q, k, v, out, grad, stats = (add_tensor(graph, like) for like in likes)
    lengths, (of_q, of_k, of_stats) = add_tensor(graph, sizes.lengths), _starts(graph, sizes)
    for tensor, start in ((q, of_q), (k, of_k), (v, of_k), (out, of_q), (grad, of_q), (stats, of_stats)):
        tensor.set_ragged_offset(start)
    grads = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=out,
        dO=grad,
        stats=stats,
        attn_scale=sizes.scale,
        use_padding_mask=True,
        seq_len_q=lengths,
        seq_len_kv=lengths,
        max_total_seq_len_q=sizes.num_tokens,
        max_total_seq_len_kv=sizes.num_tokens,
        use_deterministic_algorithm=sizes.is_deterministic,
        **bounds_of(sizes.left, sizes.right),
    )
    for gradient, like, start in zip(grads, (sizes.queries, sizes.keys, sizes.keys), (of_q, of_k, of_k), strict=True):
        set_output(gradient, like)
        gradient.set_ragged_offset(start)
    return CudnnPlan(graph, (q, k, v, lengths, of_q, of_k, of_stats, out, stats, grad, *grads))


def _starts(graph: Any, sizes: _Sizes) -> tuple[Any, Any, Any]:
    of_q, of_k, of_stats = (add_tensor(graph, sizes.starts) for _ in range(3))
    return of_q, of_k, of_stats


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    return attend_on_samples(q, k, v, mask, scale, cudnn_forward, cudnn_backward)


def _kernel_refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    band = band_of(mask)
    if band is None or band.documents is None:
        return f"it is for documents that lie behind one another, and the mask is {mask!r}"
    why = half_refusal(q, k, v, score=score, widest=128)
    if why is None and q.size(2) != k.size(2):
        why = f"there are {q.size(2)} queries and {k.size(2)} keys"
    return why or _other_refusal(q.device, q.size(0) * q.size(2), q.size(2), band.left, band.right)


KERNEL = kernel(
    __name__, "cuDNN's fused attention on documents", _run, order=15, refusal=_kernel_refusal, name="cudnn-varlen"
)
