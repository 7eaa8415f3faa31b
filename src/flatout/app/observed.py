"""The process under observation, or the launcher of several: waited for, reported, and ended with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from flatout.core.runtime.end_signals import END_SIGNALS

if TYPE_CHECKING:
    from flatout.app.progress import StatusLine

_POLL_S: Final = 0.2
_PATIENCE_S: Final = 5.0
"""What a script has for its own end: its `finally`, its `atexit`, its handler of SIGTERM."""
_WRITING_S: Final = 15.0
"""What writing the Evidence of a long observation may take."""
_FREEZE_S: Final = 1.0
"""Ranks that other processes end are stopped first, for some polls of those, so that none sees another end."""


class Ended(NamedTuple):
    """How an observed process ended: the exit code that is passed on, and why."""

    code: int
    signal: int = 0
    """The signal to this process that ended it, 0 for none."""
    is_by_us: bool = False
    """Whether it was ended because the observation was complete."""
    was_printed: bool = False
    """Whether the report was printed while the script went on."""


class ObservedCommand(NamedTuple):
    """What is to be run under observation, and what is to be done when that is complete."""

    command: list[str]
    is_complete: Callable[[], bool]
    stop: bool
    """Whether the script is ended when the observation is complete."""
    has_peers: bool = False
    """Whether other processes wait for it: then it never ends by itself, but is killed."""
    ranks: Callable[[], list[int]] | None = None
    """The processes that observe, where the command only launches them."""
    print_now: Callable[[], None] | None = None
    """Prints the report while the script goes on."""
    progress: Path | None = None
    """The file that says how far it has come, for the terminal."""
    output: IO[bytes] | None = None
    """Where its output goes, if not where ours does."""
    environment: dict[str, str] | None = None
    """Its variables, if they are not ours."""


class ObservedProcess:
    """A process under observation with all that it starts."""

    def __init__(self, request: ObservedCommand) -> None:
        from flatout.core.runtime.process_tree import descendants, processes

        self._request = request
        self._before = frozenset(descendants(os.getpid(), processes()))
        """Other children of this process: they are spared."""

    def wait(self) -> Ended:
        """Run the command to its end, its own or the one that we or a signal make.

        With `stop` an observed process ends itself when it is alone; one that does not, and ranks, are ended from here. The
        first Ctrl-C is the script's, to do with what it likes; after a second one, SIGTERM or SIGHUP it writes what there is.
        """
        from flatout.app.progress import StatusLine
        from flatout.core.runtime.process_tree import adopting_orphans

        request = self._request
        errors = subprocess.STDOUT if request.output is not None else None
        with adopting_orphans(), _receiving() as received:
            child = subprocess.Popen(request.command, stdout=request.output, stderr=errors, env=request.environment)
            with StatusLine(request.progress or Path(), sys.stderr, is_wanted=request.progress is not None) as status:
                return self._ended(child, received, status)

    def end_rest(self) -> None:
        """Kill what the process has started, and itself, if that still runs."""
        from flatout.core.runtime.process_tree import end_processes

        end_processes(self._living())

    def _ended(self, child: subprocess.Popen[bytes], received: list[int], status: StatusLine) -> Ended:
        request = self._request
        complete_at: float | None = None
        was_printed = False
        while True:
            try:
                code = child.wait(timeout=_POLL_S)
                return Ended(128 - code if code < 0 else code, was_printed=was_printed)  # the shell's way with a signal
            except subprocess.TimeoutExpired:
                status.update()
            if number := _wanted_end(received):
                self._end_with(child, number, received)
                return Ended(128 + number, signal=number, was_printed=was_printed)
            if complete_at is None and request.is_complete():
                complete_at = monotonic()
                status.close()
            if complete_at is None or monotonic() - complete_at <= _PATIENCE_S:
                continue
            if request.stop:
                self._kill(child, freeze_s=_FREEZE_S if request.has_peers else 0.0)
                return Ended(0, is_by_us=True)
            if not was_printed and request.print_now is not None:
                request.print_now()
            was_printed = True

    def _end_with(self, child: subprocess.Popen[bytes], number: int, received: list[int]) -> None:
        """Have the script write what there is and end: by the signal we got, by one that no script handles, then for good.

        Another signal that comes meanwhile ends the patience.
        """
        from flatout.core.runtime.process_tree import processes, send
        from flatout.core.runtime.script import WRITE_NOW

        if self._request.ranks is not None:
            send(child.pid, signal.SIGSTOP)  # a launcher complains at length of ranks that end
        before = len(received)
        for asked, patience_s in ((number, _PATIENCE_S), (WRITE_NOW, _WRITING_S)):
            waiting = [child.pid] if self._request.ranks is None else self._request.ranks()
            for pid in waiting:
                if asked != signal.SIGINT:  # it has got two of them
                    send(pid, asked)
            end = monotonic() + (patience_s if asked != signal.SIGINT else 0.0)
            while waiting and monotonic() < end and len(received) == before:
                sleep(_POLL_S / 4)
                known = processes()
                waiting = [pid for pid in waiting if pid in known and known[pid].state not in "ZX"]
            if not waiting or len(received) > before:
                break
        self._kill(child)

    def _kill(self, child: subprocess.Popen[bytes], *, freeze_s: float = 0.0) -> None:
        from flatout.core.runtime.process_tree import send

        if freeze_s:
            for pid in self._living():
                send(pid, signal.SIGSTOP)
            sleep(freeze_s)
        self.end_rest()
        child.kill()
        child.wait()

    def _living(self) -> list[int]:
        """The process and what is below it; its orphans are our own children now."""
        from flatout.core.runtime.process_tree import descendants, processes

        return [pid for pid in descendants(os.getpid(), processes()) if pid not in self._before]


@contextmanager
def _receiving() -> Iterator[list[int]]:
    """The signals that this process gets meanwhile, in their order; none of them ends it. An ignored one (nohup) stays so.

    Outside the main thread, which gets them, nothing is watched.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *END_SIGNALS)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wanted_end(received: list[int]) -> int:
    """The signal that is to end all, 0 for none yet: the terminal gives the script the first Ctrl-C too, and it decides."""
    ending = [number for number in received if number in END_SIGNALS]
    if ending:
        return ending[0]
    return signal.SIGINT if received.count(signal.SIGINT) > 1 else 0
