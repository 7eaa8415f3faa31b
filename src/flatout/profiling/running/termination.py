"""Being told to end (SIGTERM) while a script is observed: write down what was seen, then end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

TERMINATED: Final = 128 + signal.SIGTERM
"""The shell's exit code for a process that SIGTERM ended."""


class Ending:
    """Whether the script is over and its Evidence is being written anyway."""

    def __init__(self) -> None:
        self.has_begun = False


@contextmanager
def writing_when_terminated(write: Callable[[], None]) -> Iterator[Ending]:
    """Call `write` when SIGTERM comes, then end the process; a signal after `has_begun` is passed over.

    A launcher ends all ranks so when one has failed, and waits half a minute before it kills. A script that handles SIGTERM
    itself keeps its own handler. Outside the main thread nothing is watched.
    """
    ending = Ending()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield ending
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if ending.has_begun or os.getpid() != own:
            if os.getpid() != own:  # a forked child inherited this handler
                os._exit(TERMINATED)
            return
        ending.has_begun = True
        try:
            write()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(TERMINATED)

    own = os.getpid()
    signal.signal(signal.SIGTERM, handle)
    try:
        yield ending
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
