"""Intercepts the operators of one step to see which memory each of them makes, and for which line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any, Final

import torch

from flatout.check.observe.memory.graphs import next_number, tensors_in_sequences
from flatout.check.observe.memory.storages import Storages
from flatout.check.observe.operators.recorder import Interception
from flatout.core.runtime.source_sites import Sites

_CHECKPOINT_FILE: Final = "torch/utils/checkpoint.py"


class MemoryMode(Interception):
    """Files the storages of every operator's arguments and results while entered. Our own mistakes end it, never the script.

    `after` is called after each operator with the results filed.
    """

    def __init__(
        self, sites: Sites, storages: Storages, *, module: Callable[[], str], after: Callable[[], None]
    ) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.checkpoint_calls: dict[int, str] = {}
        """Lines that call torch.utils.checkpoint, with the module that ran there."""
        self.line_of_node: dict[int, tuple[int, str]] = {}
        self._sites = sites
        self._storages = storages
        self._module = module
        self._after = after
        self._last_node = next_number() - 1
        self._looked_above: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.failure is None:
            try:
                self._file(args, kwargs, out)
            except Exception as e:  # noqa: BLE001  # ours, not the user's: raised at the end of the step
                self.failure = e
        return out

    def _file(self, args: Sequence[Any], kwargs: dict[str, Any] | None, out: Any) -> None:
        storages = self._storages
        used = [(t, storages.find(t)) for t in tensors_in_sequences((*args, *(kwargs or {}).values()))]
        outside = [t for t, stored in used if stored is None]
        written = [(t, storages.find(t)) for t in tensors_in_sequences(out)]
        new = [t for t, stored in written if stored is None or stored.born >= 0]
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
        """The line, the module path and whether it is recomputed of the last operator; in a backward the forward one."""
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

    def _look_above(self, frame: FrameType, module: str) -> None:
        """Whether torch.utils.checkpoint is among the callers of this line, and who called it."""
        inside = False
        for above, _ in walk_stack(frame):
            if above.f_code.co_filename.endswith(_CHECKPOINT_FILE):
                inside = True
            elif inside and self._sites.is_user_code(above.f_code):
                self.checkpoint_calls.setdefault(self._sites.of_frame(above), module)
                return


def _is_below_checkpoint(frame: FrameType) -> bool:
    return any(above.f_code.co_filename.endswith(_CHECKPOINT_FILE) for above, _ in walk_stack(frame))
