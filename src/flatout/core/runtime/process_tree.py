"""The processes below one: who they are, what processor time they took, and how all of them are ended without a word.

Read from /proc (Linux); where there is none, nobody is known and nobody is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLEANERS: Final = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Processes that remove shared memory from /dev/shm when those that used it have ended, and then end by themselves."""
_CLEANING_S: Final = 2.0
_POLL_S: Final = 0.02


class ProcessState(NamedTuple):
    """A process: its parent, one letter for its state ('R', 'S', 'Z', ...), and the processor time it took."""

    parent: int
    state: str
    processor_s: float
    """Its threads', and that of its children that have ended and been waited for."""


def processes() -> dict[int, ProcessState]:
    """All processes by their ids. Takes some 20 us a process."""
    found: dict[int, ProcessState] = {}
    if not _PROC.is_dir():
        return found
    for name in os.listdir(_PROC):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                found[int(name)] = _state_of((_PROC / name / "stat").read_text(errors="replace"))
    return found


def descendants(of: int, known: Mapping[int, ProcessState]) -> list[int]:
    """Children of a process, their children and so on, nearest first; those that have ended are left out.

    >>> known = {2: ProcessState(1, "S", 0.0), 3: ProcessState(2, "R", 0.0), 4: ProcessState(2, "Z", 0.0)}
    >>> descendants(1, known)
    [2, 3]
    """
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in known.items():
        children[process.parent].append(pid)
    found: list[int] = []
    waiting = [of]
    while waiting:
        for pid in children[waiting.pop(0)]:
            waiting.append(pid)
            if known[pid].state not in "ZX":
                found.append(pid)
    return found


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Have processes below this one become its children when their own parent ends, so that they are found (Linux)."""
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def end_processes(pids: Iterable[int]) -> None:
    """Kill these processes. All are stopped first, so that none sees another end and complains of it.

    Those that clean up after the others come last, and end by themselves if they do so soon.
    """
    pids = list(pids)
    cleaners = [pid for pid in pids if _is_cleaner(pid)]
    others = [pid for pid in pids if pid not in cleaners]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            send(pid, number)
    end = monotonic() + _CLEANING_S
    while cleaners and monotonic() < end:
        sleep(_POLL_S)
        known = processes()
        cleaners = [pid for pid in cleaners if pid in known and known[pid].state not in "ZX"]
    for pid in cleaners:
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _state_of(stat: str) -> ProcessState:
    """What a line of /proc/PID/stat holds (proc(5)); the name in brackets may hold anything.

    >>> _state_of("7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 0")
    ProcessState(parent=1, state='S', processor_s=0.0)
    """
    fields = stat.rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessState(parent=int(fields[1]), state=fields[0], processor_s=ticks / os.sysconf("SC_CLK_TCK"))


def _is_cleaner(pid: int) -> bool:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def _set_subreaper(is_wanted: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted))
