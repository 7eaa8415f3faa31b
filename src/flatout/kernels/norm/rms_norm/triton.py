"""One Triton kernel forward and one backward, the sum before the norm included."""

from __future__ import annotations

from torch import Tensor

from flatout.kernels.forced import no_triton
from flatout.kernels.norm.fused import normed
from flatout.records.kernel import Kernel


def rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result. Its gradient cannot be differentiated again."""
    return normed(x, weight_D, None, residual, eps=eps, is_centred=False)


def refusal(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> str | None:
    """GPUs, at most 32 bits a number, one dtype of x and residual."""
    if residual is not None and residual.dtype != x.dtype:
        return f"the residual is {residual.dtype}, x {x.dtype}"
    return no_triton(x, weight_D, residual)


KERNEL = Kernel(
    id="norm.rms_norm.triton",
    op="norm.rms_norm",
    title="One Triton kernel each way",
    module=__name__,
    run=rms_norm,
    refusal=refusal,
    order=100,
)
