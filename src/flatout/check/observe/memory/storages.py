"""Every storage that lives during one step: what created it, on which line, when it came and when it went."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

from torch import Tensor, UntypedStorage

from flatout.check.observe.memory.process import touched_bytes

_LARGE_BYTES: Final = 8 << 20
_LOOKS_AT_PAGES: Final = 16
"""Operators that use a large storage before it is taken as filled as far as it will be (workspaces never are in full)."""
_FULL: Final = 0.99
MAX_STORAGES: Final = 100_000
"""Storages followed in one step; about 2 us and 500 bytes each."""


class StorageEvent(NamedTuple):
    """Bytes that came (above 0) or went on a device."""

    at_s: float
    phase: str
    bytes: int
    device: str


@dataclass(slots=True, eq=False, kw_only=True)
class Stored:
    """One storage. `born` and `died` are positions in the list of events; `born` is -1 for one that was there before."""

    key: int
    address: int
    at_s: float
    bytes: int
    resident_bytes: int
    """Bytes with memory behind them: on a CPU a page that nobody has written takes none."""
    device: str
    example: str
    born: int
    site: int
    module: str
    phase: str
    died: int | None = None
    looks_left: int = 0
    kind: str = ""
    is_saved: bool = False
    ref: weakref.ref[UntypedStorage] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the memory is still referenced."""
        return self.ref is not None and self.ref() is not None


class Storages:
    """The storages of one step by identity. A weak reference reports a storage's death, in whatever thread it happens."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self.all: list[Stored] = []
        self.events: list[StorageEvent] = []
        self.live: dict[str, int] = {}
        """Bytes alive now by device; a guide only, the events are the truth."""
        self._is_closed = False
        self._by_key: dict[int, Stored] = {}
        self._phase = phase

    def find(self, tensor: Tensor) -> Stored | None:
        """The record of the memory behind a tensor."""
        storage = _storage(tensor)
        return None if storage is None else self._by_key.get(int(storage._cdata))

    def add(self, tensor: Tensor, *, site: int = -1, module: str = "", is_old: bool = False) -> Stored | None:
        """Follow the memory behind a tensor; the record of one that is known already, None where there is no memory."""
        storage = _storage(tensor)
        if storage is None:
            return None
        known = self._by_key.get(int(storage._cdata))
        size = int(storage.nbytes())
        if known is not None and known.bytes == size:
            return known
        if not size or storage.device.type == "meta" or len(self.all) >= MAX_STORAGES:
            return None
        if known is not None:  # resized in place
            self._end(known)
        phase = self._phase()
        born = -1 if is_old else len(self.events)
        stored = Stored(
            key=int(storage._cdata),
            address=_address(storage),
            at_s=perf_counter(),
            bytes=size,
            resident_bytes=size,
            device=str(storage.device),
            example=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
            born=born,
            site=site,
            module=module,
            phase=phase,
        )
        if not is_old:
            self.events.append(StorageEvent(perf_counter(), phase, stored.bytes, stored.device))
        self._by_key[stored.key] = stored
        self.all.append(stored)
        self.live[stored.device] = self.live.get(stored.device, 0) + stored.bytes
        stored.ref = weakref.ref(storage, lambda _: self._end(stored))
        if not is_old and stored.bytes >= _LARGE_BYTES and stored.device == "cpu":
            stored.looks_left = _LOOKS_AT_PAGES
        return stored

    def name(self, kinds: Iterable[tuple[str, Tensor]]) -> None:
        """Say what known storages serve as; the first word stands."""
        for kind, tensor in kinds:
            stored = self.find(tensor)
            if stored is not None and not stored.kind:
                stored.kind = kind

    def add_saved(self, tensors: Iterable[Tensor]) -> None:
        """These lie in a graph that a backward is about to go through."""
        for tensor in tensors:
            stored = self.find(tensor)
            if stored is not None:
                stored.is_saved = True

    def look_at_pages(self, stored: Stored) -> None:
        """Find how far a large storage has been filled, after an operator that used it."""
        storage = stored.ref() if stored.ref is not None else None
        if stored.looks_left and storage is not None:
            stored.resident_bytes = touched_bytes(storage.data_ptr(), stored.bytes)
            stored.looks_left = stored.looks_left - 1 if stored.resident_bytes < _FULL * stored.bytes else 0

    def close(self) -> None:
        """The step is over: what dies from now on is no longer an event of it."""
        self._is_closed = True

    def start_bytes(self, device: str) -> int:
        """What was alive when the step began."""
        return sum(s.bytes for s in self.all if s.born < 0 and s.device == device)

    def _end(self, stored: Stored) -> None:
        if stored.died is not None:
            return
        stored.died = len(self.events)
        if self._is_closed:
            return
        self.events.append(StorageEvent(perf_counter(), self._phase(), -stored.bytes, stored.device))
        self.live[stored.device] = self.live.get(stored.device, 0) - stored.bytes
        if self._by_key.get(stored.key) is stored:
            del self._by_key[stored.key]


def _address(storage: UntypedStorage) -> int:
    try:
        return int(storage.data_ptr())
    except RuntimeError:  # a wrapper's storage has none
        return 0


def _storage(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return None


class StoragePeak(NamedTuple):
    """The moment at which most was alive on a device: after which event, how much, in which phase."""

    event: int
    bytes: int
    phase: str


def storage_peak(storages: Storages, device: str) -> StoragePeak:
    """The largest sum of living bytes, from the events."""
    live = storages.start_bytes(device)
    best = StoragePeak(-1, live, "other")
    for index, event in enumerate(storages.events):
        if event.device == device:
            live += event.bytes
            if live > best.bytes:
                best = StoragePeak(index, live, event.phase)
    return best


def alive_at(storages: Storages, device: str, event: int) -> list[Stored]:
    """The storages that were alive right after this event."""
    return [s for s in storages.all if s.device == device and s.born <= event and (s.died is None or s.died > event)]
