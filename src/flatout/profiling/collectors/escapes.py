"""Which results of a deep step are of use to somebody other than the step's own operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flatout.profiling.operators.recorder import OperatorKey, storage_of
from flatout.profiling.patching import Patches
from flatout.profiling.steps.schedule import Mode

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


_OURS: Final = "flatout.profiling."


class Escapes:
    """Watches the deep steps for results that are kept, written into older memory, or handed to Python.

    Calls are known by their OperatorKey: what one call of a line does, all of them are taken to do.
    """

    def __init__(self) -> None:
        self.keys: set[OperatorKey] = set()
        self.num_steps = 0
        self._is_first = True
        self._made_by: dict[int, OperatorKey] = {}
        self._older: dict[int, OperatorKey] = {}
        self._kept: list[tuple[OperatorKey, StorageWeakRef]] = []
        self._patches = Patches()

    def install(self, patches: Patches) -> None:
        """Nothing is watched outside the deep steps."""

    def begin(self, mode: Mode) -> None:
        """A step begins; only deep ones matter."""
        if mode is Mode.DEEP:
            self._older, self._made_by = self._made_by, {}
            for name in _HANDED_OUT:
                self._patches.set(Tensor, name, self._noting(getattr(Tensor, name)))

    def end(self, mode: Mode) -> None:
        """A step ended. What the first deep step made and is still alive now is kept on purpose."""
        if mode is Mode.DEEP:
            self._patches.undo()
            self.num_steps += 1
            self._is_first = False
            if self.num_steps > 2:  # a loop's own variables from the first step have been bound anew by now
                self.keys.update(key for key, kept in self._kept if not kept.expired())
                self._kept.clear()

    def remove(self) -> None:
        """Forget what was held."""
        self._patches.undo()
        self._kept.clear()

    @property
    def is_known(self) -> bool:
        """Whether enough deep steps were seen to tell what is kept."""
        return self.num_steps > 2

    def inspect(
        self,
        func: Any,
        key: OperatorKey,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        producers: tuple[int, ...],
    ) -> None:
        """A call has just run."""
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
                self._made_by[storage] = key
                if self._is_first:
                    self._kept.append((key, StorageWeakRef(result.untyped_storage())))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def handing_out(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            key = self._made_by.get(storage_of(tensor)) or self._older.get(storage_of(tensor))
            if key is not None and not sys._getframe(1).f_globals.get("__name__", "").startswith(_OURS):
                self.keys.add(key)
            return original(tensor, *args, **kwargs)

        return handing_out


def _writes_outside(func: Any, inputs: Sequence[Tensor], producers: tuple[int, ...]) -> bool:
    """Whether a call writes into memory that was there before the step (a buffer, a running statistic, a weight)."""
    if "batch_norm" in func.__name__ and any(producers[i] < 0 for i in range(3, len(producers))):
        return True  # the running statistics: torch's schema does not tell
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        return False
    return any(producer < 0 for tensor, producer in zip(inputs, producers, strict=True) if tensor.dtype != torch.bool)
