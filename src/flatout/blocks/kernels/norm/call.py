"""`flatout.rms_norm` and `flatout.layer_norm`: the public function, which checks its arguments and selects a kernel."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from flatout.blocks.kernels.opaque import Side
from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

_rms_norm = kernel_operator(
    "norm.rms_norm", "(Tensor x, Tensor? weight, Tensor? residual, *, float eps, str? kernel) -> Tensor[]"
)
_layer_norm = kernel_operator(
    "norm.layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, *, float eps, str? kernel) -> Tensor[]",
)


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, residual: None = None, *, eps: float = ..., kernel: str | None = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor, *, eps: float = ..., kernel: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm: x over the root of its mean square along the last dimension, times `weight`.

    With a `residual` of x's shape, x + residual is normed, and both are returned: `normed, residual = rms_norm(x, weight,
    residual)`; on a GPU in one kernel. Sums are float32 (float64 for float64), results have the dtype of x, autocast changes
    nothing. The weight may have another dtype. `kernel` is the id of the implementation, by default the first that can run:
    `norm.rms_norm.triton`, `.blocked`, `.native`, `.reference`. The gradients of the first two cannot be differentiated again.

    Raises UsageError for shapes that do not fit, and for a kernel that cannot run them.

    >>> import torch
    >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    tensor([1.2000, 1.6000, 0.0000, 0.0000])
    """
    _check(x, residual, weight=weight)
    results: list[Tensor] = _rms_norm(x, weight, residual, eps=eps, kernel=kernel)
    return results[0] if residual is None else (results[0], results[1])


@overload
def layer_norm(
    x: Tensor, weight: Side = ..., bias: Side = ..., residual: None = ..., *, eps: float = ..., kernel: str | None = ...
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Side, bias: Side, residual: Tensor, *, eps: float = ..., kernel: str | None = ...
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm: x with zero mean and unit variance along the last dimension, times `weight`, plus `bias`.

    As `rms_norm` in all else: `normed, residual = layer_norm(x, weight, bias, residual)` norms the sum. Kernels are
    `norm.layer_norm.triton`, `.native`, `.reference`.

    >>> import torch
    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    _check(x, residual, weight=weight, bias=bias)
    results: list[Tensor] = _layer_norm(x, weight, bias, residual, eps=eps, kernel=kernel)
    return results[0] if residual is None else (results[0], results[1])


def _check(x: Tensor, residual: Tensor | None, **vectors: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise UsageError(f"x is {x.dtype} of shape {tuple(x.shape)}; give floating-point numbers with a last dimension")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UsageError(
                f"{name} {tuple(vector.shape)} is not one number for each of the {x.shape[-1]} of a row of x"
            )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise UsageError(
            f"residual {tuple(residual.shape)} of {residual.dtype} is not like x, {tuple(x.shape)} of {x.dtype}; "
            "give one that is, or add it yourself"
        )
