"""One Triton kernel forward and one backward, the sum before the norm included."""

from __future__ import annotations

from torch import Tensor

from flatout.blocks.kernels.norm.triton_norms import normed
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel


def triton_rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result. Its gradient cannot be differentiated again."""
    return normed(x, weight_D, None, residual, eps=eps, is_centred=False)


KERNEL = kernel(__name__, "One Triton kernel forward, one backward", triton_rms_norm, order=100, refusal=no_triton)
