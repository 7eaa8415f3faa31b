"""cap * tanh by the instruction `tanh.approx.f32` of NVIDIA GPUs (compute capability 7.5 and later), in
FlexAttention's kernels.

Its largest relative error is 2^-11 (PTX ISA, tanh). Elsewhere, and in eager code, it is torch's tanh. The lowering is an
interface of Inductor that torch does not promise to keep; it is registered when the form is first asked for.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

_NAME: Final = "flatout::capped_approx"


def capped(share: Tensor, cap: float) -> Tensor:
    """cap * tanh(share), elementwise; `register` comes first."""
    out: Tensor = torch.ops.flatout.capped_approx(share, cap)[0]
    return out


@cache
def register() -> None:
    """Make the operator known to torch, once. It returns the tanh too, for the derivative."""
    torch.library.define(_NAME, "(Tensor share, float cap) -> (Tensor, Tensor)")
    torch.library.impl(_NAME, "CompositeExplicitAutograd", _eager)
    torch.library.register_fake(_NAME, lambda share, cap: (torch.empty_like(share), torch.empty_like(share)))
    torch.library.register_autograd(_NAME, _backward, setup_context=_save)
    torch.library.register_vmap(_NAME, _batched)
    _lowered()


def _eager(share: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(share)
    return cap * tanh, tanh


def _batched(info: Any, in_dims: Any, share: Tensor, cap: float) -> tuple[tuple[Tensor, Tensor], tuple[Any, Any]]:
    return torch.ops.flatout.capped_approx(share, cap), (in_dims[0], in_dims[0])


def _lowered() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    instruction = partial(ops.inline_asm_elementwise, asm="tanh.approx.f32 $0, $1;")

    def lowered(share: Any, cap: float) -> Any:
        def whole(x: Any) -> Any:
            return ops.mul(instruction(x), ops.constant(cap, torch.float32))

        return make_pointwise(whole)(share), make_pointwise(instruction)(share)

    register_lowering(torch.ops.flatout.capped_approx)(lowered)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.cap = inputs[1]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, unused: Tensor) -> tuple[Tensor, None]:
    """The derivative of cap * tanh(x) is cap * (1 - tanh^2)."""
    (tanh,) = ctx.saved_tensors
    return grad * (ctx.cap - ctx.cap * tanh * tanh), None
