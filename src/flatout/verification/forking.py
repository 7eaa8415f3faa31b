"""Stages forked from a process that has imported torch already, so that a script does not wait for that at each of its starts.

A server for each set of environment variables: some of them count only before a process has begun. Both sides of a comparison
start this way, or neither.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import IO, Final, NoReturn, Protocol

_LONGEST_MESSAGE: Final = 1 << 16
_KILLED: Final = -int(signal.SIGKILL)


class Child(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Of the process, which leads a group of its own."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that killed it. Raises subprocess.TimeoutExpired."""


def fork_servers() -> ForkServers | None:
    """Servers where processes can be forked safely: Linux; elsewhere system libraries start threads behind one's back."""
    return ForkServers() if sys.platform == "linux" else None


class ForkServers:
    """Servers by environment, each started when it is first wanted. `end` them: their stages go with them."""

    def __init__(self) -> None:
        self._servers: dict[tuple[tuple[str, str], ...], _Server] = {}

    def end(self) -> None:
        """End them all, and what they have forked."""
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def start(
        self, request: str, descriptors: tuple[int, int], said: IO[bytes], environment: Mapping[str, str]
    ) -> Child:
        """A stage for the request in this file, its orders and answers on these pipes, and what it prints in `said`."""
        key = tuple(sorted(environment.items()))
        server = self._servers.get(key)
        if server is not None and not server.is_alive:
            server.end()
            server = None
        if server is None:
            server = self._servers[key] = _Server(environment)
        return server.start(request, (*descriptors, said.fileno()))


class _Server:
    """The parent's side of one server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flatout.cli.stage", "--serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, request: str, descriptors: tuple[int, ...]) -> Forked:
        status, theirs = os.pipe()
        try:
            # one that has died closes its end: the stage's pipes then say so
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [request.encode()], [*descriptors, theirs])
        finally:
            os.close(theirs)
        return Forked(status)

    def end(self) -> None:
        self._socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it was still importing
            self._process.wait()


class Forked:
    """A stage that a server forked. It writes its number to `status` when it runs, the server its exit code when it has ended."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._told = b""
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Of the stage; waits until it has been forked. 0 when the server died before that."""
        while not self._lines() and self._hears(None):
            pass
        return self._lines()[0] if self._lines() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that killed it. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else monotonic() + timeout
        while self._code is None:
            if len(self._lines()) > 1:
                self._ended(self._lines()[1])
            elif not self._hears(None if deadline is None else max(0.0, deadline - monotonic())):
                self._ended(_KILLED)  # the server is gone, and took its stages along
        return self._code

    def _ended(self, code: int) -> None:
        self._code = code
        os.close(self._status)

    def _lines(self) -> list[int]:
        return [int(line) for line in self._told.split(b"\n")[:-1]]

    def _hears(self, timeout: float | None) -> bool:
        """Read on; whether there can be more. Raises subprocess.TimeoutExpired."""
        if self._code is not None:
            return False
        ready, _, _ = select.select([self._status], [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired("stage", timeout or 0.0)
        data = os.read(self._status, _LONGEST_MESSAGE)
        self._told += data
        return bool(data)


def serve(descriptor: int, run: Callable[[str, int, int], int]) -> NoReturn:
    """Fork a stage for each request that comes over the socket behind `descriptor`, until it is closed.

    `run` is what a stage does with the path of a request and the descriptors of its orders and answers; it returns the exit code.
    """
    orders = socket.socket(fileno=descriptor)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up below is written
    signal.set_wakeup_fd(wakes)
    stages: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([descriptor, woken], [], [])
        if woken in ready:
            os.read(woken, _LONGEST_MESSAGE)
            _reap(stages)
        if descriptor not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(orders, _LONGEST_MESSAGE, 4)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for unwanted in (descriptor, woken, wakes, *stages.values()):
                os.close(unwanted)
            orders.detach()
            _become_stage(request.decode(), descriptors, run)
        for unwanted in descriptors[:3]:
            os.close(unwanted)
        stages[pid] = descriptors[3]


def _reap(stages: dict[int, int]) -> None:
    """Tell the parent how stages ended."""
    while stages:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = stages.pop(pid)
        with suppress(BrokenPipeError):
            os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _become_stage(request: str, descriptors: list[int], run: Callable[[str, int, int], int]) -> NoReturn:
    """In the forked process: a group, a standard input, output and error of its own, then the script."""
    orders, answers, said, status = descriptors
    os.setsid()  # so that what it starts can be ended with it
    os.write(status, b"%d\n" % os.getpid())
    os.close(status)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, standard in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(ours, standard)
    os.close(nothing)
    os.close(said)
    code = 1
    try:
        code = run(request, orders, answers)
    except BaseException:  # noqa: BLE001  # nothing may go on as another server
        traceback.print_exc()
    finally:
        os._exit(code)
