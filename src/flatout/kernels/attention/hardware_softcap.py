"""cap * tanh(score / cap) by the instruction `tanh.approx.f32` of NVIDIA GPUs (compute capability 7.5 and later), in
FlexAttention's kernels.

Its largest relative error is 2^-11 (PTX ISA, tanh). Elsewhere, and in eager code, it is torch's tanh. The lowering is an
interface of Inductor that torch does not promise to keep; it is registered when the form is first asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

_NAME: Final = "flatout::softcap_approx"


def softcap(score: Tensor, cap: float) -> Tensor:
    """Elementwise; `register` comes first."""
    out: Tensor = torch.ops.flatout.softcap_approx(score, cap)
    return out


@cache
def register() -> None:
    """Make the operator known to torch, once."""
    torch.library.define(_NAME, "(Tensor score, float cap) -> Tensor")
    torch.library.impl(_NAME, "CompositeExplicitAutograd", lambda score, cap: cap * torch.tanh(score * (1 / cap)))
    torch.library.register_fake(_NAME, lambda score, cap: torch.empty_like(score))
    torch.library.register_autograd(_NAME, _backward, setup_context=_save)
    torch.library.register_vmap(_NAME, lambda info, in_dims, score, cap: (softcap(score, cap), in_dims[0]))
    _lowered()


def _lowered() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def lowered(score: Any, cap: float) -> Any:
        def each(x: Any) -> Any:
            share, whole = ops.constant(1 / cap, torch.float32), ops.constant(cap, torch.float32)
            return ops.mul(ops.inline_asm_elementwise(ops.mul(x, share), asm="tanh.approx.f32 $0, $1;"), whole)

        return make_pointwise(each)(score)

    register_lowering(torch.ops.flatout.softcap_approx)(lowered)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.share = 1 / inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """The derivative of cap * tanh(x / cap) is 1 - tanh^2; the cap cancels."""
    (out,) = ctx.saved_tensors
    tanh = out * ctx.share
    return grad - grad * tanh * tanh, None
