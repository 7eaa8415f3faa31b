"""The processes of one node: its fork server, and the folder of memory copies that outlives its ranks."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from flatout.blocks.elastic.fork_server import environment_for, server_command
from flatout.blocks.elastic.messages import NodeWork
from flatout.core.errors import UsageError

_PREFIX: Final = "flatout-survive-"
_LOCK: Final = "lock"
_PATIENCE_S: Final = 20.0


class NodeMemory:
    """A folder of a file system in memory, owned while this is open; in a `with` it is removed at the end.

    What an owner left that was killed is removed by the next one on the machine: its lock is free.
    """

    def __init__(self, within: Path) -> None:
        if not within.is_dir() or not os.access(within, os.W_OK):
            raise UsageError(f"'{within}' is no folder to write to; give one in memory (such as /dev/shm) as memory")
        _tidy(within)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=within))
        self._lock = _locked(self.path)

    def __enter__(self) -> NodeMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _tidy(within: Path) -> None:
    for left in within.glob(f"{_PREFIX}*"):
        if not (left / _LOCK).exists():
            continue  # just being created
        with suppress(OSError):
            descriptor = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)


class Node:
    """Starts this node's fork server, again where it has died, with a connection of which `start` returns this side's end."""

    def __init__(self, work: NodeWork, environment: Mapping[str, str]) -> None:
        self.work = msgspec.structs.replace(work, visible=environment.get("CUDA_VISIBLE_DEVICES"))
        self._environment = environment_for(self.work, environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start a fork server, and return this side's end of the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.attach(theirs)
        return ours

    def attach(self, connection: socket.socket) -> None:
        """Start a fork server that is connected over this socket."""
        self.kill()
        self._process = subprocess.Popen(
            server_command(connection.fileno(), self.work),
            stdin=subprocess.PIPE,  # ends when we do, however that is
            env=self._environment,
            pass_fds=(connection.fileno(),),
        )

    def end(self) -> None:
        """Have the fork server end, with its ranks, and remove the memory copies."""
        if self._process is not None:
            self._close_input(self._process)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
        self.kill()

    def kill(self) -> None:
        """End the fork server at once; its ranks die with it, the memory copies stay."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._close_input(process)

    def _close_input(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def ending_signals(end: Callable[[int], object]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `end` with their number inside; outside the main thread nothing is changed."""
    handled = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: end(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
