"""Mixed precision as one object: what runs in 16 bits, what is summed in float32, and the scaler that float16 needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.core.runtime.patches import set_attributes

Kind = Literal["bfloat16", "float16", "float32"]
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_REDUCTIONS: Final = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


class Precision:
    """`with precision:` around forward and loss, `precision.backward(loss)`, `precision.update(optimizer)`.

    Products run in `kind`; weights, gradients and the optimizer stay in float32. Products of 16-bit numbers are summed in float32
    to the end: torch by default allows a GPU to add parts of a sum in 16 bits, and here it is not, in forward and backward. Flags
    are put back. 'float16' brings a gradient scaler, which skips steps whose gradients overflow; with a fused optimizer the host
    does not wait for that. 'float32' does nothing, so that a script need not ask.
    """

    def __init__(self, kind: Kind = "bfloat16", *, device: torch.device | str = "cpu") -> None:
        if kind not in _DTYPES:
            raise UsageError(f"precision '{kind}' is none of {', '.join(_DTYPES)}")
        self._device = torch.device(device).type
        self.dtype = _DTYPES[kind]
        """The dtype in which matrix products are computed."""
        self._scaler = torch.amp.GradScaler(self._device, enabled=kind == "float16")
        self._sums = _float32_sums if self._device == "cuda" and kind != "float32" else nullcontext
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Precision:
        with ExitStack() as stack:
            stack.enter_context(self._sums())
            stack.enter_context(torch.autocast(self._device, self.dtype, enabled=self.dtype is not torch.float32))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, error, tb)

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, scaled where that is needed."""
        scaled: Tensor = self._scaler.scale(loss)
        with self._sums():
            scaled.backward()

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> Tensor | None:
        """The optimizer's step, gradients clipped to `max_norm` before; returns their norm, on the device, if they were."""
        norm = None
        if max_norm is not None:
            self._scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The scaler's; empty without one."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with its scale."""
        self._scaler.load_state_dict(state)


@contextmanager
def _float32_sums() -> Iterator[None]:
    """No product on a GPU adds in 16 bits inside."""
    undo = set_attributes(torch.backends.cuda.matmul, **dict.fromkeys(_REDUCTIONS, False))
    try:
        yield
    finally:
        undo()
