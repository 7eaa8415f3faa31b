"""`flatout.swiglu`: the public function, which checks its arguments and selects a kernel."""

from __future__ import annotations

from torch import Tensor

from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

_swiglu = kernel_operator("swiglu", "(Tensor gate, Tensor? up, *, str? kernel) -> Tensor")


def swiglu(gate: Tensor, up: Tensor | None = None, *, kernel: str | None = None) -> Tensor:
    """`F.silu(gate) * up`, nothing but the inputs kept for the backward pass.

    Without `up`, `gate` is packed: the first half of its last dimension gates the second, as one projection for both makes them;
    its gradient then is one tensor too. What is between is float32 (float64 for float64), the result has the dtype of `gate`, and
    its gradient cannot be differentiated again (the reference's can).

    `kernel` is the id of the implementation, by default the first that can run: `swiglu.triton`, `.recomputed`, `.reference`.
    Raises UsageError for shapes that do not fit, and for a kernel that cannot run them.

    >>> import torch
    >>> swiglu(torch.tensor([0.0, 100.0]), torch.tensor([5.0, 2.0]))
    tensor([  0., 200.])
    >>> swiglu(torch.tensor([0.0, 100.0, 5.0, 2.0]))
    tensor([  0., 200.])
    """
    _check(gate, up)
    result: Tensor = _swiglu(gate, up, kernel=kernel)
    return result


def _check(gate: Tensor, up: Tensor | None) -> None:
    if gate.dim() == 0 or not gate.is_floating_point():
        raise UsageError(
            f"gate is {gate.dtype} of shape {tuple(gate.shape)}; give floating-point numbers with a last dimension"
        )
    if up is None and gate.shape[-1] % 2:
        raise UsageError(f"gate {tuple(gate.shape)} has no halves; give an even last dimension, or gate and up apart")
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise UsageError(
            f"up {tuple(up.shape)} of {up.dtype} is not like gate, {tuple(gate.shape)} of {gate.dtype}; give one that is"
        )
