"""A node that is not the supervisor's: it connects, forks what it is told to, and connects again where its zygote has died."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from flatout.errors import UsageError
from flatout.surviving.node import Memory, Node

if TYPE_CHECKING:
    from flatout.surviving.supervisor import Job

_TRY_S: Final = 0.2


def host_and_port(text: str) -> tuple[str, int]:
    """Of 'host:port'.

    >>> host_and_port("node0:29400")
    ('node0', 29400)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"'{text}' is no HOST:PORT")
    return host, int(port)


def attend(job: Job, node: int, coordinator: tuple[str, int], environment: Mapping[str, str]) -> int:
    """Serve the supervisor at that address as node `node` until it lets go; the exit code.

    Raises UsageError when there is none within the job's `join_s`.
    """
    with Memory(Path(job.memory)) as memory:
        here = Node(job.work(node, memory.path), environment)
        _end_on_signals()
        try:
            while True:
                with _connected(coordinator, job.join_s) as connection:
                    here.attach(connection)
                if here.wait() == 0:
                    return 0
        finally:
            here.end()


def _connected(address: tuple[str, int], patience_s: float) -> socket.socket:
    deadline = monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(address, timeout=None)
        except OSError as e:
            if monotonic() > deadline:
                raise UsageError(
                    f"no supervisor at {address[0]}:{address[1]} within {patience_s:g} s ({e}); start node 0 there"
                ) from e
            sleep(_TRY_S)


def _end_on_signals() -> None:
    """SIGTERM and SIGINT end this node, with its ranks; the supervisor then counts it as lost."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
