"""NVIDIA cuDNN's fused attention within a window, through its own front end (the package nvidia-cudnn-frontend): torch binds
the kernel without windows.

Plans are kept by shape, strides and window.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from flatout.blocks.kernels.attention.structures import Band, band_of
from flatout.core.parts import kernel


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
        out = torch.empty_like(q)  # keeps the strides of the queries
        stats = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
        _forward_plan(q.device, *map(_like, (q, k, v, out)), band, scale)(q, k, v, out, stats)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.band, ctx.scale = band, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats = ctx.saved_tensors
        grad = grad if grad.stride() == out.stride() else torch.empty_like(out).copy_(grad)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        plan = _backward_plan(q.device, *map(_like, (q, k, v, out)), ctx.band, ctx.scale)
        plan(q, k, v, out, stats, grad, *grads)
        return (*grads, None, None)


@cache
def _forward_plan(
    device: torch.device, q: TensorLike, k: TensorLike, v: TensorLike, out: TensorLike, band: Band, scale: float
) -> CudnnPlan:
    graph = new_graph(device, q.dtype)
    queries, keys, values = (add_tensor(graph, like) for like in (q, k, v))
    result, stats = graph.sdpa(
        q=queries, k=keys, v=values, generate_stats=True, attn_scale=scale, **bounds_of(band.left, band.right)
    )
    set_output(result, out)
    set_output(stats, _like_stats(q))
    return CudnnPlan(graph, (queries, keys, values, result, stats))


@cache
def _backward_plan(
    device: torch.device, q: TensorLike, k: TensorLike, v: TensorLike, out: TensorLike, band: Band, scale: float
) -> CudnnPlan:
    graph = new_graph(device, q.dtype)
    queries, keys, values, result, grad = (add_tensor(graph, like) for like in (q, k, v, out, out))
    stats = add_tensor(graph, _like_stats(q))
    grads = graph.sdpa_backward(
        q=queries,
        k=keys,
        v=values,
        o=result,
        dO=grad,
        stats=stats,
        attn_scale=scale,
        **bounds_of(band.left, band.right),
    )
    for gradient, like in zip(grads, (q, k, v), strict=True):
        set_output(gradient, like)
    return CudnnPlan(graph, (queries, keys, values, result, stats, grad, *grads))


def _like_stats(q: TensorLike) -> TensorLike:
    """The log-sum-exp of each query."""
    batch, heads, queries, _ = q.shape
    return TensorLike((batch, heads, queries, 1), (heads * queries, queries, 1, 1), torch.float32)


def _like(tensor: Tensor) -> TensorLike:
    # empty_like packs what has gaps, so that the plan is made for what is given
    return TensorLike(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    out: Tensor = _Window.apply(q, k, v, band, scale)  # type: ignore[no-untyped-call]
    return out


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    why = half_refusal(q, k, v, score=score, widest=128)
    if why is not None:
        return why
    band = band_of(mask)
    if band is None or band.documents is not None or band.left is None or band.right != 0:
        return f"it is for windows that end at the query, and the mask is {mask!r}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    if not has_cudnn():
        return "nvidia-cudnn-frontend is not installed; `pip install nvidia-cudnn-frontend` makes windows faster"
    return None


KERNEL = kernel(
    __name__, "cuDNN's fused attention within a window", _run, order=14, refusal=_refusal, name="cudnn-window"
)
