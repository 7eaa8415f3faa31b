"""A signal to one thread, many times a second, by the wall clock: what an unbiased sampler of Python lines needs.

A sampling thread cannot look at a line that holds the interpreter: it runs only where the interpreter is given up, so
that its samples pile up on those lines. A signal is delivered at once and handled at the next bytecode. POSIX timers
(timer_create(2), SIGEV_THREAD_ID, Linux) leave SIGALRM, SIGPROF and their timers to the script.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_SIGEV_THREAD_ID: Final = 4
_SIGNAL_OFFSET: Final = 9
"""SIGRTMIN + 9: glibc keeps the first two for itself, and few programs use any beyond the next ones."""


class _SigEvent(ctypes.Structure):
    """struct sigevent of <asm-generic/siginfo.h>: 64 bytes, the thread's id in the union after the notification kind."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread_id", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("first", _TimeSpec))


class TimerSignal:
    """Calls `handle(frame)` in the main thread every `period_s`, between `start` and `stop`; nothing where that cannot be had.

    It can be had on Linux, from the main thread, when nobody else handles the signal; see `is_running`.
    """

    def __init__(self, handle: Callable[[FrameType], None], *, period_s: float) -> None:
        self.is_running = False
        self._handle = handle
        self._period_s = period_s
        self._timer = ctypes.c_void_p()
        self._process = os.getpid()

    def start(self) -> None:
        """Install the handler and arm the timer."""
        if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
            return
        if self._is_taken():
            return
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "timer_create"):
            return
        signal.signal(self._signal, self._on_signal)
        signal.siginterrupt(self._signal, False)
        event = _SigEvent(signo=self._signal, notify=_SIGEV_THREAD_ID, thread_id=threading.get_native_id())
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            signal.signal(self._signal, signal.SIG_DFL)
            return
        self.is_running = True
        atexit.register(self.stop)  # a signal after Python has put the default action back would end the process
        self.set_period(self._period_s)

    def set_period(self, period_s: float) -> None:
        """Let the next signals come every `period_s` seconds."""
        if self.is_running:
            period = _TimeSpec(seconds=int(period_s), nanoseconds=int(period_s % 1 * 1e9))
            spec = _TimerSpec(interval=period, first=period)
            ctypes.CDLL(None).timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        """Delete the timer and take the handler away."""
        if not self.is_running:
            return
        self.is_running = False
        atexit.unregister(self.stop)
        ctypes.CDLL(None).timer_delete(self._timer)
        # A signal sent before the timer was gone may still be pending, and the default action would end the process.
        ours = signal.getsignal(self._signal) == self._on_signal
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(self._signal, signal.SIG_IGN)
            signal.signal(self._signal, signal.SIG_DFL)

    def _is_taken(self) -> bool:
        """Whether somebody else handles the signal; our own handler in the process that forked this one does not count."""
        handler = signal.getsignal(self._signal)
        owner = getattr(handler, "__self__", None)
        is_from_parent = isinstance(owner, TimerSignal) and owner._process != os.getpid()
        return handler is not signal.SIG_DFL and not is_from_parent

    @property
    def _signal(self) -> int:
        return signal.SIGRTMIN + _SIGNAL_OFFSET

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and self.is_running and self._process == os.getpid():
            self._handle(frame)
