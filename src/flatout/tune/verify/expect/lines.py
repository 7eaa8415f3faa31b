"""The line of the user's behind each operator: a dispatch mode that marks the profiler's tape, and counts where there is none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.check.observe.operators.recorder import OperatorRecorder, is_composite
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.expect.kernels import KernelLaunch
from flatout.tune.verify.expect.operators import is_computing
from flatout.tune.verify.expect.tape_annotations import AT, annotate
from flatout.tune.verify.expect.waits import Wait

_READS: Final = {
    "aten._local_scalar_dense": "item",
    "aten.nonzero": "nonzero",
    "aten.masked_select": "masked_select",
    "aten.equal": "equal",
    "aten._unique2": "unique",
    "aten.unique_dim": "unique",
    "aten.unique_consecutive": "unique_consecutive",
}
"""Operators whose result, or its shape, the host needs to know."""
_HOST_ONLY: Final = "/torch/optim/"
"""torch's optimizers keep their counters of steps on the CPU, also when the parameters are on a device: reading them waits for
nothing anywhere."""
_METHODS: Final = {"tolist": "tolist", "numpy": "numpy", "__repr__": "print", "__format__": "format"}


class LineMode(TorchDispatchMode):
    """Marks each operator with its line while entered; backward operators with that of their forward.

    `reads` are host reads of CPU tensors, which would be waits on a device; `on_other_threads` operators of threads that the
    region started (the profiler watches its own thread alone); `devices` the kinds of devices that computed. Compiled code runs
    under it as it is.
    """

    supports_higher_order_operators = True

    def __init__(self, sites: Sites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[Wait] = []
        self.on_other_threads: list[KernelLaunch] = []
        self.devices: set[str] = set()
        self.is_paused = False
        self.is_over = False
        self._started: set[int] = set()
        self._sites = sites
        self._reading = 0
        self._places = OperatorRecorder(sites, phase=lambda: "", module=lambda: "", is_device=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by dynamo: functions are compiled, and run compiled, as if this mode were not there."""
        return True

    def enter(self) -> None:
        """Begin to annotate the operators of this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop annotating, also in the threads that were started meanwhile."""
        self.is_over = True
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def watch_methods(self, patches: Patches) -> None:
        """Note the methods of tensors that read numbers without an operator."""
        for name, call in _METHODS.items():
            patches.set(Tensor, name, self._reading_method(getattr(Tensor, name), call))

    def watch_threads(self, patches: Patches) -> None:
        """Have threads that are started from now on run under this mode, until it is over."""
        start: Callable[..., None] = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            run = thread.run

            def watched(*args: Any, **kwargs: Any) -> None:
                self._started.add(get_ident())
                with self:
                    run(*args, **kwargs)

            thread.run = watched  # type: ignore[method-assign]  # of this one thread
            start(thread)

        patches.set(threading.Thread, "start", starting)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or self.is_over:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):  # of higher order (flex_attention): what it runs has its line
            with annotate(f"{AT}{self._sites.of_frame(sys._getframe(1))}"):
                return func(*args, **kwargs)
        if get_ident() in self._started:
            return self._run_on_other_thread(func, args, kwargs)
        frame = sys._getframe(1)
        site, _, _ = self._places.place_of(frame)
        self._note_read(func, args, frame, site)
        with annotate(f"{AT}{site}"):
            out = func(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor) and first.device.type not in self.devices and is_computing(*_named(func)):
            self.devices.add(first.device.type)
        return out

    def _run_on_other_thread(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        frame = sys._getframe(2)
        site = self._sites.of_frame(frame)
        name, overload = _named(func)
        if is_computing(name, overload):
            is_backward = torch._C._current_autograd_node() is not None
            self.on_other_threads.append(KernelLaunch(name, site, is_backward, "operator"))
        self._note_read(func, args, frame, site)
        return func(*args, **kwargs)

    def _note_read(self, func: Any, args: Sequence[Any], frame: FrameType, site: int) -> None:
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
        call = _READS.get(name) or _mask_of(name, args)
        if call is None or self._reading or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
            return
        if not _is_below(frame, _HOST_ONLY):
            self.reads.append(Wait(call, site))

    def _reading_method(self, original: Callable[..., Any], call: str) -> Callable[..., Any]:
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._reading or self.is_over or not tensor.numel():
                return original(tensor, *args, **kwargs)
            site = self._sites.of_frame(sys._getframe(1))
            if tensor.device.type == "cpu":
                self.reads.append(Wait(call, site))
            self._reading += 1
            try:
                with annotate(f"{AT}{site}"):
                    return original(tensor, *args, **kwargs)
            finally:
                self._reading -= 1

        return reading


def _named(func: Any) -> tuple[str, str]:
    """An operator's name and overload as the tape has them: ('aten::add', 'Tensor')."""
    overload = func._overloadname
    return func._schema.name, "" if overload == "default" else overload


def _mask_of(name: str, args: Sequence[Any]) -> str | None:
    """Indexing by a mask: how many numbers it picks decides a shape. Writing one number through a mask does not ask."""
    if name not in ("aten.index", "aten.index_put", "aten.index_put_") or len(args) < 2:
        return None
    if name != "aten.index" and len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1:
        return None
    is_mask = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return "index by a mask" if is_mask else None


def _is_below(frame: FrameType | None, folder: str) -> bool:
    """Whether a file of this folder is among the callers, up to a few frames: torch's own run that deep, no deeper."""
    for _ in range(12):
        if frame is None:
            return False
        if folder in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
