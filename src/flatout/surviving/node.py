"""One node's processes: its zygote, and the folder of memory copies that outlives its ranks."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from flatout.errors import UsageError
from flatout.surviving.zygote import Work, command, environment_for

_PREFIX: Final = "flatout-survive-"
_LOCK: Final = "lock"
_PATIENCE_S: Final = 20.0


class Memory:
    """A folder of a file system in memory, owned while this is open; in a `with` it is removed at the end.

    What an owner left that was killed is removed by the next one on the machine: its lock is free.
    """

    def __init__(self, within: Path) -> None:
        if not within.is_dir() or not os.access(within, os.W_OK):
            raise UsageError(f"'{within}' is no folder to write to; give one in memory (such as /dev/shm) as memory")
        _tidy(within)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=within))
        self._lock = _locked(self.path)

    def __enter__(self) -> Memory:
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
            continue  # just being made
        with suppress(OSError):
            descriptor = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)


class Node:
    """Starts this node's zygote, again where it has died. They talk over a socket that `start` returns or `attach` is given."""

    def __init__(self, work: Work, environment: Mapping[str, str]) -> None:
        self.work = msgspec.structs.replace(work, visible=environment.get("CUDA_VISIBLE_DEVICES"))
        self._environment = environment_for(self.work, environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """A zygote on this side's end of a new pair."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.attach(theirs)
        return ours

    def attach(self, connection: socket.socket) -> None:
        """A zygote that talks over this connection."""
        self.kill()
        self._process = subprocess.Popen(
            command(connection.fileno(), self.work),
            stdin=subprocess.PIPE,  # ends when we do, however that is
            env=self._environment,
            pass_fds=(connection.fileno(),),
        )

    def wait(self) -> int:
        """Until the zygote has ended; its exit code, or minus its signal."""
        return self._process.wait() if self._process is not None else 0

    def end(self) -> None:
        """Have the zygote end, with its ranks, and remove the memory copies."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End the zygote at once; its ranks die with it, the memory copies stay."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
