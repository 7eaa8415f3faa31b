"""An optimizer's state kept in the host's memory, and on the device for the time of its step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Undo = Callable[[], None]


def offload_state(optimizer: Optimizer) -> Undo:
    """Have an optimizer's state leave the device after each step and come back before the next; returns how to end it.

    The state comes back exactly. On a CUDA device it lies in pinned memory; it leaves on a stream of its own, while the next
    forward runs, and is brought in on the stream of the step. It takes the device's memory during the step, when activations
    do not; it costs two copies of the state for each step.
    """
    state = _HostState(optimizer)
    handles = (
        optimizer.register_step_pre_hook(lambda *_: state.bring_in()),
        optimizer.register_step_post_hook(lambda *_: state.send_out()),
        optimizer.register_state_dict_pre_hook(lambda _: state.wait()),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()
        state.bring_in()

    return undo


class _HostState:
    """Host memory for the state of one optimizer, made when it is first sent out and used again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._out: dict[tuple[Tensor, str], Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def wait(self) -> None:
        """Until what is under way to the host is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def bring_in(self) -> None:
        """Put what is out back on its parameter's device; what somebody has replaced meanwhile stays as it is."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for (parameter, name), host in self._out.items():
            values: dict[str, Any] = self._optimizer.state.get(parameter, {})
            if values.get(name) is host:
                values[name] = torch.empty_like(host, device=parameter.device).copy_(host, non_blocking=True)

    def send_out(self) -> None:
        """Move all state that has its parameter's size to the host."""
        for parameter, values in self._optimizer.state.items():
            for name, value in values.items():
                is_state = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
                if is_state and value.device == parameter.device:
                    values[name] = self._sent(parameter, name, value)

    def _sent(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        host = self._out.get((parameter, name))
        if host is None:
            host = self._out[parameter, name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        if not value.is_cuda:
            return host.copy_(value)
        if value.device not in self._streams:
            self._streams[value.device] = torch.cuda.Stream(value.device)
        stream = self._streams[value.device]
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(stream):
            host.copy_(value, non_blocking=True)
        value.record_stream(stream)
        return host
