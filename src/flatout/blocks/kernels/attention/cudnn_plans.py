"""Plans of NVIDIA cuDNN's fused attention, by its own front end (the package nvidia-cudnn-frontend): torch binds less of it.

The first call for a plan builds it, some 0.1 s; callers keep plans by what they depend on.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorLike(NamedTuple):
    """What a plan needs to know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class CudnnPlan:
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
        self._graph.execute(dict(zip(self._tensors, operands, strict=True)), workspace, handle=_current_handle(device))


def _current_handle(device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _handle(device, stream)


@cache
def _handle(device: torch.device, stream: int) -> Any:
    """A handle of cuDNN for each stream: one that is switched between streams makes them wait for one another."""
    import cudnn

    with torch.cuda.device(device if device.type == "cuda" else -1):
        handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream)
    return handle


def new_graph(device: torch.device, dtype: torch.dtype) -> Any:
    """A graph of cuDNN's whose tensors have this dtype, and whose sums are of float32."""
    import cudnn

    return cudnn.pygraph(
        io_data_type=cudnn_type(dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_current_handle(device),
    )


def bounds_of(left: int | None, right: int | None) -> dict[str, Any]:
    """The arguments that have a query see keys from `left` before it to `right` after it, None for all on that side."""
    import cudnn

    return {
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        # cuDNN counts the query's own place among the keys to the left, and not among those to the right
        "diagonal_band_left_bound": None if left is None else left + 1,
        "diagonal_band_right_bound": right,
    }


def cudnn_type(dtype: torch.dtype) -> Any:
    """The name that cuDNN has for the dtype."""
    import cudnn

    types = {
        torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT", torch.int32: "INT32", torch.int64: "INT64",
    }  # fmt: skip
    return getattr(cudnn.data_type, types[dtype])


def add_tensor(graph: Any, like: TensorLike) -> Any:
    """An input of the graph."""
    return graph.tensor(dim=list(like.shape), stride=list(like.stride), data_type=cudnn_type(like.dtype))


def set_output(tensor: Any, like: TensorLike) -> None:
    """Have the graph write this tensor."""
    tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride)).set_data_type(
        cudnn_type(like.dtype)
    )


@cache
def has_cudnn() -> bool:
    """Whether the package is installed."""
    return find_spec("cudnn") is not None
