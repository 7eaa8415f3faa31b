"""Sides of a proof, forked from a process that has imported torch, so that a script does not wait for that at each start.

There is a server for each set of environment variables, as some of them count only before a process has begun. Both sides of a
comparison start this way, or neither.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import IO, Final, NoReturn, Protocol

from flatout.core.runtime.fork_server import ForkedChildren

_LONGEST_MESSAGE: Final = 1 << 16
_KILLED: Final = -int(signal.SIGKILL)


class ChildProcess(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """The id of the process, which leads a process group of its own."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code, or minus the signal that killed it. Raises subprocess.TimeoutExpired."""


def fork_servers() -> ForkServers | None:
    """Fork servers on Linux; None elsewhere, where system libraries start threads, so that forking is not safe."""
    return ForkServers() if sys.platform == "linux" else None


@contextmanager
def closing_servers() -> Iterator[ForkServers | None]:
    """`fork_servers` for the time of a context."""
    servers = fork_servers()
    try:
        yield servers
    finally:
        if servers is not None:
            servers.end()


class ForkServers:
    """Servers by environment, each started when it is first wanted. `end` them: their sides go with them."""

    def __init__(self) -> None:
        self._servers: dict[tuple[tuple[str, str], ...], _Server] = {}

    def end(self) -> None:
        """End them all, and what they have forked."""
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def start(
        self, request: str, descriptors: tuple[int, int], output: IO[bytes], environment: Mapping[str, str]
    ) -> ChildProcess:
        """Start a side for the request in this file; its orders and answers are on these pipes, its output in `output`."""
        key = tuple(sorted(environment.items()))
        server = self._servers.get(key)
        if server is not None and not server.is_alive:
            server.end()
            server = None
        if server is None:
            server = self._servers[key] = _Server(environment)
        return server.start(request, (*descriptors, output.fileno()))


class _Server:
    """One server, as the process that started it sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flatout.app.cli.children.proof_side", "--serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, request: str, descriptors: tuple[int, ...]) -> ForkedSide:
        status, theirs = os.pipe()
        try:
            # one that has died closes its end: the side's pipes then end
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [request.encode()], [*descriptors, theirs])
        finally:
            os.close(theirs)
        return ForkedSide(status)

    def end(self) -> None:
        self._socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it was still importing
            self._process.wait()


class ForkedSide:
    """A side that a server forked. It writes its number to `status` when it runs, the server its exit code when it has ended."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._received = b""
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; waits until it has been forked. 0 when the server died before that."""
        while not self._lines() and self._read_more(None):
            pass
        return self._lines()[0] if self._lines() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code, or minus the signal that killed it. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else monotonic() + timeout
        while self._code is None:
            if len(self._lines()) > 1:
                self._ended(self._lines()[1])
            elif not self._read_more(None if deadline is None else max(0.0, deadline - monotonic())):
                self._ended(_KILLED)  # the server is gone, and took its sides along
        return self._code

    def _ended(self, code: int) -> None:
        self._code = code
        os.close(self._status)

    def _lines(self) -> list[int]:
        return [int(line) for line in self._received.split(b"\n")[:-1]]

    def _read_more(self, timeout: float | None) -> bool:
        """Read more of what was written; whether there can be more. Raises subprocess.TimeoutExpired."""
        if self._code is not None:
            return False
        ready, _, _ = select.select([self._status], [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired("side", timeout or 0.0)
        data = os.read(self._status, _LONGEST_MESSAGE)
        self._received += data
        return bool(data)


def serve(descriptor: int, run: Callable[[str, int, int], int]) -> NoReturn:
    """Fork a side for each request that comes over the socket behind `descriptor`, until it is closed.

    `run` is what a side does with the path of a request and the descriptors of its orders and answers; it returns the exit code.
    """
    requests = socket.socket(fileno=descriptor)
    sides: ForkedChildren[int] = ForkedChildren()
    sides.watch()
    while True:
        watched: list[socket.socket | ForkedChildren[int]] = [requests, sides]
        ready, _, _ = select.select(watched, [], [])
        if sides in ready:
            _report_ended(sides)
        if requests not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_MESSAGE, 4)
        if not request:
            os._exit(0)
        child = partial(_run_side, request.decode(), descriptors, run)
        sides.fork(descriptors[3], child, closing=(requests.fileno(), *sides.by_pid.values()))
        for unwanted in descriptors[:3]:
            os.close(unwanted)


def _report_ended(sides: ForkedChildren[int]) -> None:
    """Write the exit codes of sides that have ended where the parent reads them."""
    for _, status, code in sides.reap():
        with suppress(BrokenPipeError):
            os.write(status, b"%d\n" % code)
        os.close(status)


def _run_side(request: str, descriptors: list[int], run: Callable[[str, int, int], int]) -> int:
    """The forked process: in a session of its own, with a standard output and error of its own, it runs the script."""
    orders, answers, output, status = descriptors
    os.setsid()  # so that what it starts can be ended with it
    os.write(status, b"%d\n" % os.getpid())
    os.close(status)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    return run(request, orders, answers)
