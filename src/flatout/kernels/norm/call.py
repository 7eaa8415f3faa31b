"""`flatout.rms_norm` and `flatout.layer_norm`: checks, a choice, a call."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.forced import kernel_for
from flatout.kernels.opaque import composed


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
    """x over the root of its mean square along the last dimension, times `weight`.

    With a `residual` of x's shape, x + residual is normed, and both are returned: `normed, residual = rms_norm(x, weight,
    residual)`; on a GPU in one kernel. Sums are float32 (float64 for float64), results have the dtype of x, autocast changes
    nothing. The weight may have another dtype. `kernel` is the id of the implementation, by default the first that can run:
    `norm.rms_norm.triton`, `.blocked`, `.native`, `.reference`. The gradients of the first two cannot be differentiated again.

    Raises UsageError for shapes that do not fit, and for a kernel that cannot run them.

    >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    tensor([1.2000, 1.6000, 0.0000, 0.0000])
    """
    _check(x, residual, weight=weight)
    if torch.compiler.is_compiling():
        made: list[Tensor] = torch.ops.flatout.rms_norm(x, weight, residual, eps, kernel)
    else:
        made = _rms_norm(x, weight, residual, eps, kernel)
    return made[0] if residual is None else (made[0], made[1])


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: None = None,
    *,
    eps: float = ...,
    kernel: str | None = ...,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    *,
    eps: float = ...,
    kernel: str | None = ...,
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
    """x with zero mean and unit variance along the last dimension, times `weight`, plus `bias`.

    As `rms_norm` in all else: `normed, residual = layer_norm(x, weight, bias, residual)` norms the sum. Kernels are
    `norm.layer_norm.triton`, `.native`, `.reference`.

    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    _check(x, residual, weight=weight, bias=bias)
    if torch.compiler.is_compiling():
        made: list[Tensor] = torch.ops.flatout.layer_norm(x, weight, bias, residual, eps, kernel)
    else:
        made = _layer_norm(x, weight, bias, residual, eps, kernel)
    return made[0] if residual is None else (made[0], made[1])


@composed("rms_norm(Tensor x, Tensor? weight, Tensor? residual, float eps, str? kernel) -> Tensor[]")
def _rms_norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, kernel: str | None
) -> list[Tensor]:
    made = kernel_for("norm.rms_norm", kernel, x, weight, residual, eps=eps).run(x, weight, residual, eps=eps)
    return [made] if residual is None else list(made)


@composed("layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, str? kernel) -> Tensor[]")
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, kernel: str | None
) -> list[Tensor]:
    chosen = kernel_for("norm.layer_norm", kernel, x, weight, bias, residual, eps=eps)
    made = chosen.run(x, weight, bias, residual, eps=eps)
    return [made] if residual is None else list(made)


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
