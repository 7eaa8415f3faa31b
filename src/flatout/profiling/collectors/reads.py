"""Host reads and uploads: tensor methods that hand values to Python or move data to a device, in a step of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites

_METHODS: Final = (
    "item", "tolist", "cpu", "numpy", "to", "nonzero", "masked_select", "unique",
    "__bool__", "__float__", "__int__", "__index__", "__format__", "__repr__", "cuda", "copy_",
)  # fmt: skip
_UPLOADS: Final = ("to", "cuda", "copy_")


class Read(NamedTuple):
    """Where and how, and whether the tensor was on a device."""

    site: int
    call: str
    phase: str
    on_device: bool


class Upload(NamedTuple):
    """Where memory of the host was copied to a device, from which kind of memory, and whether the call waited for it."""

    site: int
    call: str
    phase: str
    is_pinned: bool
    is_async: bool


class HostReads:
    """Wraps the methods of Tensor that read values or copy to a device, only between `begin` and `end`."""

    def __init__(self, sites: Sites, phase: Callable[[], str]) -> None:
        self.seen: dict[Read, list[float]] = {}
        self.uploads: dict[Upload, list[tuple[int, float]]] = {}
        """(bytes, seconds of the host) of each copy."""
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
            source = args[0] if name == "copy_" and args else tensor
            start = perf_counter()
            try:
                result = original(tensor, *args, **kwargs)
            finally:
                self._inside = False
            seconds = perf_counter() - start
            if name in _UPLOADS and is_upload(source, result):
                is_async = bool(kwargs.get("non_blocking", any(a is True for a in args)))
                self._note_upload(name, source, seconds, is_async=is_async)
            elif name != "cuda":
                self._note(name, source if isinstance(source, Tensor) else tensor, result, seconds)
            return result

        return reading

    def _note_upload(self, name: str, source: Tensor, seconds: float, *, is_async: bool) -> None:
        site = self._sites.of_frame(sys._getframe(2))
        if site >= 0:
            upload = Upload(site, name, self._phase(), source.is_pinned(), is_async)
            size = source.numel() * source.element_size()
            self.uploads.setdefault(upload, []).append((size, seconds))

    def _note(self, name: str, tensor: Tensor, result: Any, seconds: float) -> None:
        on_device = tensor.device.type not in ("cpu", "meta")
        if name in ("to", "copy_") and not (on_device and isinstance(result, Tensor) and result.device.type == "cpu"):
            return
        if name == "__repr__" and tensor.numel() == 0:
            return
        frame = sys._getframe(2)
        site = self._sites.of_frame(frame)
        is_torchs_own = frame.f_globals.get("__name__", "").startswith("torch.")
        if site >= 0 and not is_torchs_own:
            call = name.strip("_") if name != "__repr__" else "print"
            self.seen.setdefault(Read(site, call, self._phase(), on_device), []).append(seconds)


def is_upload(source: object, result: object) -> bool:
    """Whether `result` is a tensor on a device that was copied from the host's memory."""
    return (
        isinstance(source, Tensor)
        and isinstance(result, Tensor)
        and source.device.type == "cpu"
        and result.device.type not in ("cpu", "meta")
    )


def uses_cuda() -> bool:
    """Whether this process has begun to use a CUDA device."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def is_on_accelerator(tensors: Iterable[Tensor]) -> bool:
    """Whether a loop that works with these tensors computes on a CUDA device: one of them lies there.

    Where there are none to ask, whether this process uses a device at all.
    """
    if not uses_cuda():
        return False
    places = {t.is_cuda for t in tensors}
    return not places or True in places
