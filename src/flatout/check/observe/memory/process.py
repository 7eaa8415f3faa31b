"""The operating system's accounting of this process's memory: resident size, what malloc holds, how much is available."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SAMPLE_S: Final = 0.0005
"""Between two readings of the resident size in a watched step; one reading takes 16 us."""


class Malloc(NamedTuple):
    """Bytes that C and C++ code holds, and bytes that malloc keeps for later."""

    used: int
    free: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _of_libc(name: str, restype: Any = ctypes.c_int) -> Any:
    """A function of the C library; None where it has none of this name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    function.restype = restype
    return function


_mallinfo: Final = _of_libc("mallinfo2", _Mallinfo2)  # glibc 2.33 or later
_mincore: Final = _of_libc("mincore")


def malloc_state() -> Malloc | None:
    """The statistics of glibc's malloc (some microseconds); None with another C library."""
    if _mallinfo is None:
        return None
    info = _mallinfo()
    return Malloc(used=int(info.uordblks + info.hblkhd), free=int(info.fordblks))


def resident_bytes() -> int | None:
    """The process's resident size now; None where the system has no such figure."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def memory_limit() -> int | None:
    """Bytes of memory that this process may use: the machine's, or its container's if that is less."""
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    for path in _CGROUP_LIMITS:
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or 'max'
            continue
    return limit


def touched_bytes(address: int, size: int) -> int:
    """How much of this stretch of memory has pages behind it (what was never written has none); all where that is unknown."""
    first = address // _PAGE_BYTES * _PAGE_BYTES
    num_pages = -(-(address + size - first) // _PAGE_BYTES)
    pages = (ctypes.c_ubyte * num_pages)()
    if _mincore is None or _mincore(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), pages):
        return size
    return min(size, bytes(pages).count(1) * _PAGE_BYTES)


class Moment(NamedTuple):
    """A moment of the step: how many events there were before, and the bytes alive on the host."""

    num_events: int
    live_bytes: int


class Height(NamedTuple):
    """The moment at which malloc had most in use, and what it had."""

    moment: Moment
    malloc: Malloc


class ProcessPeak:
    """The largest resident size between `start` and `stop`, and the moment of the most malloc had in use.

    A thread of its own reads both, within operators too. The kernel's own high-water figure would need a reset, which the user's
    getrusage would show.
    """

    def __init__(self, now: Callable[[], Moment]) -> None:
        self.resident_bytes: int | None = None
        self.height: Height | None = None
        self._now = now
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read the resident size."""
        self.look()
        self._stop.clear()
        self._thread = threading.Thread(target=self._read, name="flatout-resident", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Read the resident size once more, now."""
        now = resident_bytes()
        if now is not None:
            self.resident_bytes = max(now, self.resident_bytes or 0)
        before = self._now()
        state = malloc_state()
        is_at_rest = before == self._now()  # else an operator ended meanwhile, and the two do not belong together
        if state is not None and is_at_rest and (self.height is None or state.used > self.height.malloc.used):
            self.height = Height(before, state)

    def stop(self) -> None:
        """End the thread that reads."""
        self.look()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.look()
