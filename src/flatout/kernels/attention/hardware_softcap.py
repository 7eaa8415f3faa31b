"""cap * tanh by the instruction `tanh.approx.f32` of NVIDIA GPUs (compute capability 7.5 and later), in
FlexAttention's kernels.

Its largest relative error is 2^-11 (PTX ISA, tanh). Elsewhere, and in eager code, it is torch's tanh. The lowering is an
interface of Inductor that torch does not promise to keep; it is registered when the form is first asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_NAME: Final = "flatout::capped_approx"


def capped(share: Tensor, cap: float) -> Tensor:
    """cap * tanh(share), elementwise; `register` comes first."""
    out: Tensor = torch.ops.flatout.capped_approx(share, cap)
    return out


@cache
def register() -> None:
    """Make the operator known to torch, once."""
    torch.library.define(_NAME, "(Tensor share, float cap) -> Tensor")
    torch.library.impl(_NAME, "CompositeExplicitAutograd", lambda share, cap: cap * torch.tanh(share))
    torch.library.register_fake(_NAME, lambda share, cap: torch.empty_like(share))
    torch.library.register_autograd(_NAME, _backward, setup_context=_save)
    torch.library.register_vmap(_NAME, lambda info, in_dims, share, cap: (capped(share, cap), in_dims[0]))
    _lowered()


def _lowered() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def lowered(share: Any, cap: float) -> Any:
        def whole(x: Any) -> Any:
            tanh = ops.inline_asm_elementwise(x, asm="tanh.approx.f32 $0, $1;")
            return ops.mul(tanh, ops.constant(cap, torch.float32))

        return make_pointwise(whole)(share)

    register_lowering(torch.ops.flatout.capped_approx)(lowered)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    # the tanh itself, as a second result of the operator, made the backward kernel 1.7 times slower
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """The derivative of cap * tanh(x) is cap * (1 - tanh^2) = cap - out^2 / cap."""
    (out,) = ctx.saved_tensors
    return grad * (ctx.cap - out * out * (1 / ctx.cap)), None
