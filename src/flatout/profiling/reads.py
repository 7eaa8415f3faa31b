"""Host reads: calls of tensor methods that hand values to Python, with the time they take, in two steps of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites

_METHODS: Final = (
    "item", "tolist", "cpu", "numpy", "to", "nonzero", "masked_select", "unique",
    "__bool__", "__float__", "__int__", "__index__", "__format__", "__repr__",
)  # fmt: skip


class Read(NamedTuple):
    """Where and how, and whether the tensor was on a device."""

    site: int
    call: str
    phase: str
    on_device: bool


class HostReads:
    """Wraps the methods of Tensor that read values, only between `begin` and `end`."""

    def __init__(self, sites: Sites, phase: Callable[[], str]) -> None:
        self.seen: dict[Read, list[float]] = {}
        self.num_steps = 0
        self._sites = sites
        self._phase = phase
        self._patches = Patches()
        self._inside = False
        self._thread_id = get_ident()

    def begin(self) -> None:
        """Wrap the methods."""
        for name in _METHODS:
            self._patches.set(Tensor, name, self._wrap(name, getattr(Tensor, name)))

    def end(self) -> None:
        """Put the methods back."""
        self._patches.undo()

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._inside or get_ident() != self._thread_id:
                return original(tensor, *args, **kwargs)
            self._inside = True
            start = perf_counter()
            try:
                result = original(tensor, *args, **kwargs)
            finally:
                self._inside = False
            self._note(name, tensor, result, perf_counter() - start)
            return result

        return reading

    def _note(self, name: str, tensor: Tensor, result: Any, seconds: float) -> None:
        on_device = tensor.device.type not in ("cpu", "meta")
        if name == "to" and not (on_device and isinstance(result, Tensor) and result.device.type == "cpu"):
            return
        if name == "__repr__" and tensor.numel() == 0:
            return
        frame = sys._getframe(2)
        site = self._sites.of_frame(frame)
        is_torchs_own = frame.f_globals.get("__name__", "").startswith("torch.")
        if site >= 0 and not is_torchs_own:
            call = name.strip("_") if name != "__repr__" else "print"
            self.seen.setdefault(Read(site, call, self._phase(), on_device), []).append(seconds)


def is_on_accelerator() -> bool:
    """Whether this process uses a CUDA device now."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()
