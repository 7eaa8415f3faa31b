"""Few passes over memory by PyTorch's operators: results are written where they belong, or pairs are complex numbers.

B batch, T tokens, N heads, H head dim, R pairs of a head, L positions that the tables have. Forward and backward on an EPYC
core over the reference's time, float32, (2, 256, 16, 128): 0.45 for halves, 0.12 for interleaved pairs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import opaque
from flatout.blocks.kernels.rotary.reference import ROTATION_ARGUMENTS, angles, rotate_with_gradient, rotation_shapes
from flatout.core.parts import kernel


@opaque("rotary_in_place" + ROTATION_ARGUMENTS, rotation_shapes)
def _rotate(
    x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None, layout: str, is_back: bool
) -> Tensor:
    wide = torch.promote_types(x_BTNH.dtype, torch.float32)
    x = x_BTNH.to(wide)
    cos, sin = angles(x, cos_LR, positions).to(wide), angles(x, sin_LR, positions).to(wide)
    sign = -1 if is_back else 1
    if layout == "interleaved":
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        result = torch.view_as_real(pairs * torch.complex(cos, sin * sign)).flatten(-2)
    else:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        a, b = x.chunk(2, dim=-1)
        into_a, into_b = result.chunk(2, dim=-1)
        torch.mul(a, cos, out=into_a).addcmul_(b, sin, value=-sign)
        torch.mul(b, cos, out=into_b).addcmul_(a, sin, value=sign)
    return result.to(x_BTNH.dtype)


KERNEL = kernel(__name__, "Few passes by PyTorch's operators", partial(rotate_with_gradient, _rotate), order=500)
