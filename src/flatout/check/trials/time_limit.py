"""An end to what takes too long: Python code is interrupted at its next line, one call of torch is let through."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer, get_ident


class OutOfTime(BaseException):
    """Raised in a trial when its time is over. Not an Exception, so that a user's module that catches those lets it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this thread if the code inside takes longer, out of this context at the latest."""
    thread_id = ctypes.c_ulong(get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                raise_in(thread_id, ctypes.py_object(OutOfTime))

    timer = Timer(max(0.0, seconds), interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
        raise_in(thread_id, None)  # one that is still to be raised is not any more
