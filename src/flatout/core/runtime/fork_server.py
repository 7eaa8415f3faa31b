"""The common part of fork servers: processes on one thread that have imported torch and fork children that need it.

The sides of a proof and the ranks of a supervised job begin so, without the seconds that importing takes each time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, Generic, NoReturn, TypeVar

_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 1 << 16
CHECK_CUDA_BY_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch.cuda.is_available ask the driver's library for monitoring (torch's notes on CUDA): a process whose parent has asked
CUDA itself cannot use it."""

Info = TypeVar("Info")


class ForkedChildren(Generic[Info]):
    """The children that this process has forked, by process id, each with what the server knows of it.

    Readable, for `select`, when a child may have ended since the last call of `reap`.
    """

    def __init__(self) -> None:
        self.by_pid: dict[int, Info] = {}
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)

    def watch(self) -> None:
        """Become readable from now on when a child ends. Call it once, in the main thread."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up below is written
        signal.set_wakeup_fd(self._writable)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._readable

    def fork(self, info: Info, run: Callable[[], int], *, closing: Iterable[int] = ()) -> int:
        """Fork a child that closes these descriptors of the server, calls `run` and ends with the exit code it returns.

        The child dies when this process does (on Linux), its standard input is empty, and SIGCHLD has the system's default.
        Returns the child's process id.
        """
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_child(parent, run, (self._readable, self._writable, *closing))
        self.by_pid[pid] = info
        return pid

    def reap(self) -> Iterator[tuple[int, Info, int]]:
        """Each child that has ended: its process id, what is known of it, its exit code or minus the signal that killed it."""
        with suppress(BlockingIOError):
            os.read(self._readable, _READ_BYTES)
        while self.by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield from self._ended(pid, status)

    def reap_all(self) -> Iterator[tuple[int, Info, int]]:
        """Wait until every child has ended, and yield them as `reap` does."""
        for pid in list(self.by_pid):
            yield from self._ended(*os.waitpid(pid, 0))

    def _ended(self, pid: int, status: int) -> Iterator[tuple[int, Info, int]]:
        if pid in self.by_pid:
            yield pid, self.by_pid.pop(pid), os.waitstatus_to_exitcode(status)


def die_with_parent() -> None:
    """Have the system kill this process when the one that started it ends (prctl(2), PR_SET_PDEATHSIG). Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _become_child(parent: int, run: Callable[[], int], closing: Iterable[int]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() != parent:  # it died before we asked
            os._exit(code)
        for unwanted in closing:
            os.close(unwanted)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        code = run()
    except BaseException:  # noqa: BLE001  # nothing may go on as another server
        traceback.print_exc()
    finally:
        os._exit(code)
