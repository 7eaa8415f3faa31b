"""tanh as the instruction `tanh.approx.f32` of NVIDIA GPUs (compute capability 7.5 and later), in FlexAttention's kernels.

Its largest relative error is 2^-11 (PTX ISA, tanh). Elsewhere, and in eager code, it is torch's tanh. The lowering is an
interface of Inductor that torch does not promise to keep; it is registered when the form is first asked for.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

_NAME: Final = "flatout::tanh_approx"


def tanh(x: Tensor) -> Tensor:
    """Elementwise; 1 - tanh^2 is its derivative, of the approximate value. `register` comes first."""
    out: Tensor = torch.ops.flatout.tanh_approx(x)
    return out


@cache
def register() -> None:
    """Make the operator known to torch, once."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    torch.library.define(_NAME, "(Tensor x) -> Tensor")
    torch.library.impl(_NAME, "CompositeExplicitAutograd", torch.tanh)
    torch.library.register_fake(_NAME, torch.empty_like)
    torch.library.register_autograd(_NAME, _backward, setup_context=_save)
    torch.library.register_vmap(_NAME, lambda info, in_dims, x: (torch.ops.flatout.tanh_approx(x), in_dims[0]))
    instruction = partial(ops.inline_asm_elementwise, asm="tanh.approx.f32 $0, $1;")
    register_lowering(torch.ops.flatout.tanh_approx)(make_pointwise(instruction))


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (out,) = ctx.saved_tensors
    return grad * (1 - out * out)  # type: ignore[no-any-return]
