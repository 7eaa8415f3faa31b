"""NVIDIA cuDNN's fused attention within a window, through its own front end (the package nvidia-cudnn-frontend): torch binds
the kernel without windows.

Plans are kept by shape, strides and window. The first call for one builds it, some 0.1 s.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.sdpa import half_refusal
from flatout.blocks.kernels.attention.structures import Band, band_of
from flatout.core.parts import kernel


class _Like(NamedTuple):
    """What a plan needs to know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


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


class _Plan:
    """A graph of cuDNN's, built for one shape, and the tensors that it wants in order."""

    def __init__(self, graph: Any, tensors: tuple[Any, ...]) -> None:
        import cudnn

        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._graph, self._tensors, self._num_bytes = graph, tensors, graph.get_workspace_size()

    def __call__(self, *operands: Tensor) -> None:
        device = operands[0].device
        workspace = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        handle = _handle(device, torch.cuda.current_stream(device).cuda_stream)
        self._graph.execute(dict(zip(self._tensors, operands, strict=True)), workspace, handle=handle)


@cache
def _handle(device: torch.device, stream: int) -> Any:
    """A handle of cuDNN for each stream: one that is switched between streams makes them wait for one another."""
    import cudnn

    with torch.cuda.device(device):
        handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream)
    return handle


@cache
def _forward_plan(device: torch.device, q: _Like, k: _Like, v: _Like, out: _Like, band: Band, scale: float) -> _Plan:
    graph = _graph(device, q.dtype)
    queries, keys, values = (_tensor(graph, like) for like in (q, k, v))
    result, stats = graph.sdpa(q=queries, k=keys, v=values, generate_stats=True, attn_scale=scale, **_bounds(band))
    _is_output(result, out)
    _is_output(stats, _like_stats(q))
    return _Plan(graph, (queries, keys, values, result, stats))


@cache
def _backward_plan(device: torch.device, q: _Like, k: _Like, v: _Like, out: _Like, band: Band, scale: float) -> _Plan:
    graph = _graph(device, q.dtype)
    queries, keys, values, result, grad = (_tensor(graph, like) for like in (q, k, v, out, out))
    stats = _tensor(graph, _like_stats(q))
    grads = graph.sdpa_backward(
        q=queries, k=keys, v=values, o=result, dO=grad, stats=stats, attn_scale=scale, **_bounds(band)
    )
    for gradient, like in zip(grads, (q, k, v), strict=True):
        _is_output(gradient, like)
    return _Plan(graph, (queries, keys, values, result, stats, grad, *grads))


def _graph(device: torch.device, dtype: torch.dtype) -> Any:
    import cudnn

    return cudnn.pygraph(
        io_data_type=_type(dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device, torch.cuda.current_stream(device).cuda_stream),
    )


def _bounds(band: Band) -> dict[str, Any]:
    import cudnn

    # cuDNN counts the query's own place among the keys to the left, and not among those to the right
    left = None if band.left is None else band.left + 1
    return {
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": left,
        "diagonal_band_right_bound": band.right,
    }


def _type(dtype: torch.dtype) -> Any:
    import cudnn

    types = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}
    return getattr(cudnn.data_type, types[dtype])


def _tensor(graph: Any, like: _Like) -> Any:
    return graph.tensor(dim=list(like.shape), stride=list(like.stride), data_type=_type(like.dtype))


def _is_output(tensor: Any, like: _Like) -> None:
    tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride)).set_data_type(_type(like.dtype))


def _like_stats(q: _Like) -> _Like:
    """The log-sum-exp of each query."""
    batch, heads, queries, _ = q.shape
    return _Like((batch, heads, queries, 1), (heads * queries, queries, 1, 1), torch.float32)


def _like(tensor: Tensor) -> _Like:
    # empty_like packs what has gaps, so that the plan is made for what is given
    return _Like(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@cache
def _has_cudnn() -> bool:
    return find_spec("cudnn") is not None


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
    if not _has_cudnn():
        return "nvidia-cudnn-frontend is not installed; `pip install nvidia-cudnn-frontend` makes windows faster"
    return None


KERNEL = kernel(
    __name__, "cuDNN's fused attention within a window", _run, order=14, refusal=_refusal, name="cudnn-window"
)
