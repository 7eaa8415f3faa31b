"""The gated MLP on tensors, which checks its arguments and selects a kernel.

I inputs and outputs of the MLP, H hidden width
"""

from __future__ import annotations

from torch import Tensor

from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

_float8_gating = kernel_operator(
    "float8_gating", "(Tensor x, Tensor gate, Tensor up, Tensor down, *, str? kernel) -> Tensor"
)


def float8_gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, kernel: str | None = None) -> Tensor:
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T` with products in float8, each factor rounded with one scale of the moment.

    Weights are those of `nn.Linear`, `gate` and `up` (H, I), `down` (I, H), of any dtype; `x` is (..., I), and the result has
    its shape and dtype. In eager mode rounding x and the weights are kernels of their own: compile what calls this.

    `kernel` is the id of the implementation, by default the first that can run: `float8_gating.triton`, `.reference`. Raises
    UsageError for shapes that do not fit, and for a kernel that cannot run them.
    """
    shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("gate", gate), ("up", up), ("down", down)))
    if gate.dim() != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
        raise UsageError(f"{shapes} are no gated MLP; give (H, I), (H, I) and (I, H), as nn.Linear holds them")
    if x.dim() < 1 or x.shape[-1] != gate.shape[1]:
        raise UsageError(f"x {tuple(x.shape)} does not end in the {gate.shape[1]} inputs of gate {tuple(gate.shape)}")
    if not all(t.is_floating_point() for t in (x, gate, up, down)):
        raise UsageError("x and weights are not all floating-point numbers; give such")
    result: Tensor = _float8_gating(x, gate, up, down, kernel=kernel)
    return result
