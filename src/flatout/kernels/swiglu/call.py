"""`flatout.swiglu`: checks, a choice, a call."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.forced import kernel_for
from flatout.kernels.opaque import composed


def swiglu(gate: Tensor, up: Tensor | None = None, *, kernel: str | None = None) -> Tensor:
    """`F.silu(gate) * up`, nothing but the inputs kept for the backward pass.

    Without `up`, `gate` is packed: the first half of its last dimension gates the second, as one projection for both makes them;
    its gradient then is one tensor too. What is between is float32 (float64 for float64), the result has the dtype of `gate`, and
    its gradient cannot be differentiated again (the reference's can).

    `kernel` is the id of the implementation, by default the first that can run: `swiglu.triton`, `.recomputed`, `.reference`.
    Raises UsageError for shapes that do not fit, and for a kernel that cannot run them.

    >>> swiglu(torch.tensor([0.0, 100.0]), torch.tensor([5.0, 2.0]))
    tensor([  0., 200.])
    >>> swiglu(torch.tensor([0.0, 100.0, 5.0, 2.0]))
    tensor([  0., 200.])
    """
    _check(gate, up)
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.flatout.swiglu(gate, up, kernel)
        return made
    return _swiglu(gate, up, kernel)


@composed("swiglu(Tensor gate, Tensor? up, str? kernel) -> Tensor")
def _swiglu(gate: Tensor, up: Tensor | None, kernel: str | None) -> Tensor:
    made: Tensor = kernel_for("swiglu", kernel, gate, up).run(gate, up)
    return made


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
