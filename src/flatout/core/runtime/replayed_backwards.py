"""Backwards that a graph replays: no call of `torch.autograd.backward` shows them to those who watch a script's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Listener = Callable[[Sequence["Tensor"]], None]

_LISTENERS: list[Listener] = []


def listen_to_replays(listener: Listener) -> Callable[[], None]:
    """Call `listener` with the losses of each backward that is replayed from now on; returns how to stop that."""
    _LISTENERS.append(listener)

    def stop() -> None:
        if listener in _LISTENERS:
            _LISTENERS.remove(listener)

    return stop


def announce_replay(losses: Sequence[Tensor]) -> None:
    """Tell all listeners that a backward from these losses has been replayed."""
    for listener in tuple(_LISTENERS):
        listener(losses)
