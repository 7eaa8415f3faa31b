"""Checksums of a run's first steps: models' inputs, losses, gradients, weights. Computed in hooks that are removed after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from flatout.core.records.run import StepDigests
from flatout.core.runtime.dynamo_frames import frame_outside_dynamo, outside_dynamo
from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.checksum import checksum
from flatout.core.tensors.nests import tensors_in

_MOST_ROWS: Final = 4096
"""Rows of one input whose checksums are taken one by one."""


class Fingerprint:
    """Gives the digests of each of the first `num_steps` optimizer steps to `on_step`, then calls `done`.

    The numbers of the run are not changed: nothing is drawn, and what is looked at is read only. On a device the host waits in
    these steps.
    """

    def __init__(
        self, num_steps: int, on_step: Callable[[StepDigests], None], done: Callable[[], None] = lambda: None
    ) -> None:
        self._num_steps, self._on_step, self._done = num_steps, on_step, done
        self._step = 0
        self._thread = get_ident()
        self._depth = 0
        self._names: dict[int, str] = {}
        self._patches = Patches()
        self._is_watching = False
        self._step_listener: OptimizerStepHooks | None = None
        self._clear()

    def install(self) -> None:
        """Register the hooks that compute checksums."""
        if self._step >= self._num_steps:
            return
        self._is_watching = True
        self._patches.set(nn.Module, "__call__", self._watching(nn.Module.__call__))
        self._patches.set(torch.autograd, "backward", self._watching_backward(torch.autograd.backward))
        self._step_listener = OptimizerStepHooks(before=self._before, after=self._after)

    def remove(self) -> None:
        """Remove the hooks that compute checksums."""
        if self._step_listener is not None:
            self._step_listener.remove()
            self._step_listener = None
        self._watch_no_calls()

    def _watch_no_calls(self) -> None:
        self._is_watching = False
        self._patches.undo()

    def _clear(self) -> None:
        self._inputs: list[int] = []
        self._rows: list[int] = []
        self._gradients: dict[str, int] = {}
        self._losses: list[int] = []

    def _watching(self, original: Any) -> Any:
        fingerprint = self
        is_compiling = torch.compiler.is_dynamo_compiling

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or fingerprint._depth or get_ident() != fingerprint._thread:
                return original(self, *args, **kwargs)
            fingerprint._add_inputs(self, (args, kwargs))
            fingerprint._depth += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                fingerprint._depth -= 1

        return __call__

    def _watching_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @frame_outside_dynamo
        def backward(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            if get_ident() == self._thread:
                self._add_losses((tensors,) if isinstance(tensors, Tensor) else tensors)
            original(tensors, *args, **kwargs)

        return backward

    @outside_dynamo
    def _add_losses(self, tensors: Sequence[Tensor]) -> None:
        self._losses += map(checksum, tensors)

    def _add_inputs(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), f"{type(module).__name__}.{name}")
        with torch.no_grad():
            for tensor in tensors_in(inputs):
                self._inputs.append(checksum(tensor))
                if tensor.dim() and tensor.size(0) <= _MOST_ROWS:
                    self._rows += [checksum(row) for row in tensor.detach().cpu()]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_watching:
            return
        self._gradients |= {n: checksum(p.grad) for n, p in self._parameters(optimizer) if p.grad is not None}

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_watching or get_ident() != self._thread:
            return
        digests = StepDigests(
            step=self._step,
            inputs=tuple(self._inputs),
            rows=tuple(self._rows),
            gradients=self._gradients,
            weights={name: checksum(p) for name, p in self._parameters(optimizer)},
            losses=tuple(self._losses),
        )
        self._clear()
        self._step += 1
        self._on_step(digests)
        if self._step >= self._num_steps:
            self._watch_no_calls()  # the optimizer is going through its hooks, which stay until the end of the run
            self._done()

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield self._names.get(id(parameter), f"group {number}, tensor {place}"), parameter
