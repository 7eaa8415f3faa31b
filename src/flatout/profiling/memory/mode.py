"""Intercepts the operators of one step to see which memory each of them makes, and for which line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.profiling.memory.graphs import next_number
from flatout.profiling.memory.storages import Storages
from flatout.profiling.sites import Sites

_CHECKPOINT_FILE: Final = "torch/utils/checkpoint.py"


class MemoryMode(TorchDispatchMode):
    """Files the storages of every operator's arguments and results while entered. Our own mistakes end it, never the script.

    `after` is called after each operator with the results filed.
    """

    def __init__(
        self,
        sites: Sites,
        storages: Storages,
        *,
        phase: Callable[[], str],
        module: Callable[[], str],
        after: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failure: Exception | None = None
        self.checkpoint_calls: dict[int, str] = {}
        """Lines that call torch.utils.checkpoint, with the module that ran there."""
        self.line_of_node: dict[int, tuple[int, str]] = {}
        self._sites = sites
        self._storages = storages
        self._phase = phase
        self._module = module
        self._after = after
        self._last_node = next_number() - 1
        self._looked_above: set[int] = set()

    def enter(self) -> None:
        """Begin to intercept operators."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Intercept no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.failure is None:
            try:
                self._file(args, kwargs, out)
            except Exception as e:  # noqa: BLE001  # ours, not the user's: told at the end of the step
                self.failure = e
        return out

    def _file(self, args: Sequence[Any], kwargs: dict[str, Any] | None, out: Any) -> None:
        storages = self._storages
        used = [(t, storages.find(t)) for t in _tensors((args, tuple(kwargs.values()) if kwargs else ()))]
        outside = [t for t, stored in used if stored is None]
        made = [(t, storages.find(t)) for t in _tensors(out)]
        new = [t for t, stored in made if stored is None or stored.born >= 0]
        node = torch._C._current_autograd_node()
        if new or outside or node is None:
            site, module, is_recomputed = self._place(node)
            for tensor in outside:  # it came from a loader, from NumPy, or from where Python does not look
                stored = storages.add(tensor, site=site)
                if stored is not None and not stored.kind:
                    stored.kind = "batch" if stored.phase in ("data", "transfer", "other", "forward") else "kept"
            for tensor in new:
                stored = storages.add(tensor, site=site, module=module)
                if stored is not None and is_recomputed:
                    stored.is_saved = True
                if stored is not None and stored.looks_left:
                    storages.look_at_pages(stored)
        for _, known in used:
            if known is not None and known.looks_left:
                storages.look_at_pages(known)
        self._after()

    def _place(self, node: Any) -> tuple[int, str, bool]:
        """(user line, module path, whether recomputed) of the operator that has just run; backward ones go to their forward."""
        frame = sys._getframe(3)
        if node is not None:
            if self.checkpoint_calls and _is_below_checkpoint(frame):
                return self._sites.of_frame(frame), self._module(), True
            forward = self.line_of_node.get(node._sequence_nr())
            return (*forward, False) if forward is not None else (self._sites.of_frame(frame), "", False)
        site, module = self._sites.of_frame(frame), self._module()
        last = next_number() - 1
        for number in range(self._last_node + 1, last + 1):
            self.line_of_node[number] = (site, module)
        self._last_node = max(last, self._last_node)
        if site not in self._looked_above:
            self._looked_above.add(site)
            self._look_above(frame, module)
        return site, module, False

    def _look_above(self, frame: FrameType | None, module: str) -> None:
        """Whether torch.utils.checkpoint is among the callers of this line, and who called it."""
        inside = False
        while frame is not None:
            if frame.f_code.co_filename.endswith(_CHECKPOINT_FILE):
                inside = True
            elif inside and self._sites.is_user_code(frame.f_code):
                self.checkpoint_calls.setdefault(self._sites.of_frame(frame), module)
                return
            frame = frame.f_back


def _is_below_checkpoint(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT_FILE):
            return True
        frame = frame.f_back
    return False


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in arguments or results, up to two levels of lists down."""
    found: list[Tensor] = []
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(_tensors(item))
    return found
