"""Processes of scripts that begin without importing torch: forks of a server that has imported it, as `subprocess.Popen` has
them.

`python -m flatout.blocks.elastic.preloaded SOCKET` is the server, with the descriptor of a connected socket. It ends, with all
that it has forked, when the other end is closed or its standard input ends."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from types import TracebackType
from typing import Final

from flatout.blocks.elastic.messages import ForkBegun, ForkEnded, ForkScript, NodeLink
from flatout.core.errors import FlatoutError
from flatout.core.runtime.fork_server import CHECK_CUDA_BY_NVML, ForkedChildren
from flatout.core.runtime.script import load_module, load_script, print_to_stderr, run_script

PRELOAD: Final = "FLATOUT_PRELOAD"
"""Modules that the server imports besides, separated by commas."""
_PARENT_PIPE: Final = 0
_POLL_S: Final = 0.02
_PATIENCE_S: Final = 180.0
_TRIES: Final = 3
_KILLED: Final = -int(signal.SIGKILL)
_AGENTS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a scheduler may send to all processes of a job, of which the agent makes what is to become of the ranks."""


class PreloadedProcess:
    """A forked script. `returncode` is None while it runs, then its exit code or minus its signal."""

    def __init__(self, server: PreloadedServer, number: int, pid: int) -> None:
        self._server, self._number, self.pid = server, number, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The return code, or None."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self._number)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired after so many seconds."""
        deadline_s = None if timeout is None else monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("a forked script", timeout or 0.0)
            sleep(_POLL_S)
        return code


class PreloadedServer:
    """The server's owner: starts it, again where it has died, and has it fork. To be used in a `with`."""

    def __init__(self, environment: Mapping[str, str], connection: socket.socket | None = None) -> None:
        """With a `connection` the first server is there already, at its other end (`serve_forks`)."""
        self._environment = {**environment, CHECK_CUDA_BY_NVML: "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._link = NodeLink(connection) if connection is not None else None
        self._codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._number = 0

    def __enter__(self) -> PreloadedServer:
        if self._link is None:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def fork(
        self,
        target: str,
        arguments: Sequence[str],
        *,
        is_module: bool,
        environment: Mapping[str, str],
        stdout: str | None = None,
        stderr: str | None = None,
    ) -> PreloadedProcess:
        """Run the script in a fork. Raises FlatoutError when no server can be had."""
        self._number += 1
        order = ForkScript(
            number=self._number,
            target=target,
            arguments=tuple(arguments),
            is_module=is_module,
            environment=dict(environment),
            stdout=stdout,
            stderr=stderr,
        )
        for _ in range(_TRIES):  # it may just have been killed
            self._receive()
            link = self._link
            if link is None or not link.is_open:
                link = self._start()
            link.send(order)
            deadline_s = monotonic() + _PATIENCE_S
            while order.number not in self._pids and link.is_open and monotonic() < deadline_s:
                self._receive(_POLL_S)
            if order.number in self._pids:
                return PreloadedProcess(self, order.number, self._pids[order.number])
        raise FlatoutError(f"the process that forks the ranks ended {_TRIES} times; see what it printed")

    def code_of(self, number: int) -> int | None:
        """The exit code of a fork, or minus its signal; None while it runs. With the server its forks are killed."""
        self._receive()
        if number not in self._codes and (self._link is None or not self._link.is_open):
            self._codes[number] = _KILLED
        return self._codes.get(number)

    def _receive(self, wait_s: float = 0.0) -> None:
        link = self._link
        while link is not None and link.is_open and select.select([link], [], [], wait_s)[0]:
            for event in link.received():
                if isinstance(event, ForkBegun):
                    self._pids[event.number] = event.pid
                elif isinstance(event, ForkEnded):
                    self._codes[event.number] = event.code
            wait_s = 0.0

    def _start(self) -> NodeLink:
        self._end()
        for number in self._pids.keys() - self._codes.keys():  # with the one before its forks were killed
            self._codes[number] = _KILLED
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flatout.blocks.elastic.preloaded", f"{theirs.fileno()}"],
                stdin=subprocess.PIPE,  # ends when we do, however that is
                env=self._environment,
                pass_fds=(theirs.fileno(),),
            )
        self._link = NodeLink(ours)
        return self._link

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._link is not None:
            self._receive()
            self._link.close()
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()


# -- the server's side -------------------------------------------------------------------------------------------------------


class _ScriptForker:
    def __init__(self, link: NodeLink, pipes: Sequence[int]) -> None:
        self._link, self._pipes = link, pipes
        self._children: ForkedChildren[int] = ForkedChildren()

    def serve(self) -> None:
        """Fork what is asked for until the other end is gone, or one of the pipes has ended."""
        for ignored in _AGENTS:
            signal.signal(ignored, signal.SIG_IGN)  # the agent tells the ranks itself
        self._children.watch()
        gc.collect()
        gc.freeze()  # so that a collection in a fork copies no pages of ours
        while self._link.is_open:
            watched: list[NodeLink | ForkedChildren[int] | int] = [self._link, self._children, *self._pipes]
            ready, _, _ = select.select(watched, [], [])
            if any(pipe in ready for pipe in self._pipes):
                return
            for _, number, code in self._children.reap():
                self._link.send(ForkEnded(number=number, code=code))
            for order in self._link.received() if self._link in ready else ():
                if isinstance(order, ForkScript):
                    self._fork(order)

    def _fork(self, order: ForkScript) -> None:
        pid = self._children.fork(order.number, partial(_run, order), closing=(self._link.fileno(),))
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: it may be signalled before it has done so itself
        self._link.send(ForkBegun(number=order.number, pid=pid))


def _run(order: ForkScript) -> int:
    """Become the script: its exit code."""
    os.setpgid(0, 0)
    for ignored in _AGENTS:
        signal.signal(ignored, signal.SIG_DFL if ignored != signal.SIGINT else signal.default_int_handler)
    for descriptor, path in ((1, order.stdout), (2, order.stderr)):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
    os.environ.clear()
    os.environ.update(order.environment)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as in a process of its own; forks would all draw the same
    _set_threads(order.environment.get("OMP_NUM_THREADS", ""))
    try:
        outcome = run_script((load_module if order.is_module else load_script)(order.target, order.arguments))
        code = outcome.exit_code
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        code = 2
    if not code:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as the interpreter's end does
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _set_threads(number: str) -> None:
    """Have torch use as many threads as it would had it been imported with that number in OMP_NUM_THREADS."""
    import torch

    if number.isdecimal() and int(number) != torch.get_num_threads():
        torch.set_num_threads(max(1, int(number)))


def import_for_ranks() -> None:
    """Import what ranks need, and the modules that FLATOUT_PRELOAD names."""
    from flatout.blocks.elastic.rank import warm_up

    warm_up()
    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        importlib.import_module(name)


def serve_forks(connection: socket.socket, pipes: Sequence[int] = ()) -> None:
    """Fork scripts on request in a process that has imported what they need, until the other end of the connection is gone, or
    one of the pipes has ended."""
    os.environ[CHECK_CUDA_BY_NVML] = "1"
    sys.path.pop(0)  # python put the program's own folder there; the script's goes first later
    _ScriptForker(NodeLink(connection), pipes).serve()


def main(arguments: Sequence[str]) -> None:
    """Import what ranks need, and serve."""
    connection = socket.socket(fileno=int(arguments[0]))
    import_for_ranks()
    serve_forks(connection, (_PARENT_PIPE,))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # nothing is left to be tidied up
