"""Results of a deep step that others than the step's own operators use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.operators.recorder import OperatorCall, OperatorKey, OperatorListener, storage_of
from flatout.check.observe.steps.schedule import Mode
from flatout.core.runtime.patches import Patches

_HANDED_OUT: Final = (
    "numpy",
    "tolist",
    "__array__",
    "__reduce_ex__",
    "__dlpack__",
    "data_ptr",
    "share_memory_",
    "storage",
)
"""Methods of Tensor through which values leave torch without an operator."""


_OURS: Final = ("flatout.check.", "flatout.core.runtime.")


class EscapingTensors(Collector, OperatorListener):
    """Watches the deep steps for results that outlive their step, are written into older memory, or handed to Python.

    Calls are known by their OperatorKey: what one call of a line does, all of them are taken to do.
    """

    def __init__(self) -> None:
        self.keys: set[OperatorKey] = set()
        self.num_steps = 0
        self._writers: dict[int, OperatorKey] = {}
        self._older: dict[int, OperatorKey] = {}
        self._first_results: list[tuple[OperatorKey, StorageWeakRef]] = []
        self._patches = Patches()

    def begin(self, mode: Mode) -> None:
        """A step begins; only deep ones matter."""
        if mode is Mode.DEEP:
            self._older, self._writers = self._writers, {}
            for name in _HANDED_OUT:
                self._patches.set(Tensor, name, self._noting(getattr(Tensor, name)))

    def end(self, mode: Mode) -> None:
        """A step ended. What the first deep step created and is still alive now is stored on purpose."""
        if mode is Mode.DEEP:
            self._patches.undo()
            self.num_steps += 1
            if self.num_steps > 2:  # a loop's own variables from the first step have been bound anew by now
                self.keys.update(key for key, reference in self._first_results if not reference.expired())
                self._first_results.clear()

    def restart(self) -> None:
        """Put the original methods back."""
        self._patches.undo()

    def remove(self) -> None:
        """Put the methods back, and forget the first deep step's tensors."""
        self._patches.undo()
        self._first_results.clear()

    @property
    def is_known(self) -> bool:
        """Whether there were enough deep steps to know what is stored."""
        return self.num_steps > 2

    def on_operator(self, call: OperatorCall) -> None:
        """Note what the call reads, writes and creates."""
        func, key, inputs, results, producers = call
        if not key.op.startswith("aten."):
            self.keys.add(key)  # a collective or somebody's own operator: what it does besides is unknown
        for tensor, producer in zip(inputs, producers, strict=True):
            if producer < 0 and (maker := self._older.get(storage_of(tensor))) is not None:
                self.keys.add(maker)
        if _writes_outside(func, inputs, producers):
            self.keys.add(key)
        for result in results:
            storage = storage_of(result)
            if storage >= 0:
                self._writers[storage] = key
                if not self.num_steps:
                    self._first_results.append((key, StorageWeakRef(result.untyped_storage())))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def handing_out(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            key = self._writers.get(storage_of(tensor)) or self._older.get(storage_of(tensor))
            if key is not None and not sys._getframe(1).f_globals.get("__name__", "").startswith(_OURS):
                self.keys.add(key)
            return original(tensor, *args, **kwargs)

        return handing_out


def _writes_outside(func: Any, inputs: Sequence[Tensor], producers: tuple[int, ...]) -> bool:
    """Whether a call writes into memory that was there before the step (a buffer, a running statistic, a weight)."""
    if "batch_norm" in func.__name__ and any(producers[i] < 0 for i in range(3, len(producers))):
        return True  # the running statistics: torch's schema does not show them
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return False
    return any(producer < 0 for tensor, producer in zip(inputs, producers, strict=True) if tensor.dtype != torch.bool)


COLLECTOR: Final = CollectorEntry(lambda observation: EscapingTensors())
