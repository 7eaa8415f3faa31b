"""What ranks, fork servers and supervisor tell each other: heartbeats in a page of memory, messages as lines of JSON."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from flatout.core.errors import UsageError

_ROW: Final = struct.Struct("<qqqd")
_ROW_BYTES: Final = 64
"""A cache line for each rank."""


class Heartbeat(NamedTuple):
    """How far a rank has come since the last start of the job."""

    num_steps: int = 0
    """Optimizer steps, and other signs of life, so far."""
    reached: int = -1
    """The newest step that was passed to `keep`; where it is kept in memory, the one before is safe by then."""
    resumed: int = -1
    """The step that it went on from; -1 while it has not asked."""
    first_s: float = 0.0
    """When its first step was done, on the machine's monotonic clock; 0 while it is not."""


class HeartbeatPage:
    """A page of memory that the ranks of one node write and its fork server reads. Each rank writes its own row only."""

    def __init__(self, path: Path, num_rows: int) -> None:
        path.touch(0o600)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, num_rows * _ROW_BYTES)
            self._page = mmap.mmap(file.fileno(), num_rows * _ROW_BYTES)

    def read(self, row: int) -> Heartbeat:
        return Heartbeat(*_ROW.unpack_from(self._page, row * _ROW_BYTES))

    def write(self, row: int, heartbeat: Heartbeat) -> None:
        _ROW.pack_into(self._page, row * _ROW_BYTES, *heartbeat)


@dataclass(kw_only=True)
class RankContext:
    """What a rank knows of its supervision. `advance`, `reach` and `resume` show the supervisor how far it is.

    `restart` counts how often the job has been started again: 0 at first.
    """

    job: str
    restart: int
    node: int
    row: int
    memory: Path
    heartbeats: HeartbeatPage
    restart_s: float | None
    """Seconds from a failure to the next step, as measured so far in this job."""

    def __post_init__(self) -> None:
        self._write(Heartbeat())

    def advance(self) -> None:
        """Report that a step is done, or that something else that takes long goes on."""
        heartbeat = self._heartbeat
        self._write(heartbeat._replace(num_steps=heartbeat.num_steps + 1, first_s=heartbeat.first_s or monotonic()))

    def reach(self, step: int) -> None:
        """Report that so many steps of the training are done."""
        self._write(self._heartbeat._replace(reached=step, num_steps=self._heartbeat.num_steps + 1))

    def resume(self, step: int) -> None:
        """Report the step from which this rank goes on."""
        self._write(self._heartbeat._replace(resumed=step))

    def _write(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self.heartbeats.write(self.row, heartbeat)


_current: list[RankContext] = []


def set_rank_context(context: RankContext) -> None:
    """Make this process the rank of that context: called once in each forked rank, before its script begins."""
    _current[:] = [context]


def rank_context() -> RankContext | None:
    """The context of this process; None where nobody supervises it."""
    return _current[0] if _current else None


_READ: Final = 1 << 16
_MOST_UNREAD: Final = 8 << 20
"""No message has that many bytes: the longest is the order to start, with the environment of a rank."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A script to be supervised, and how.

    A rank hangs after `hang_s` seconds without a sign of life, or `start_s` before its first. `least_ranks` to go on with, None
    for all. Raises UsageError for numbers that make no sense."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int = 1
    spares: int = 0
    hang_s: float = 300.0
    start_s: float = 1800.0
    least_ranks: int | None = None
    max_restarts: int | None = None
    memory: str = "/dev/shm"
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.spares < 0:
            raise UsageError(f"nproc {self.nproc}, spares {self.spares}; give 1 or more, and 0 or more")
        if not (self.hang_s > 0 and self.start_s > 0):
            raise UsageError(f"hang_s {self.hang_s} and start_s {self.start_s}; give positive seconds")
        if self.least_ranks is not None and not 1 <= self.least_ranks <= self.nproc:
            raise UsageError(f"least_ranks is {self.least_ranks} of {self.nproc} ranks; give 1 to all of them")

    @property
    def num_device_slots(self) -> int:
        """The number of device slots of a node, spare ones among them."""
        return self.nproc + self.spares


class NodeWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a node runs, and the folder of its memory copies."""

    job: Job
    memory: str
    visible: str | None = None
    """The value of CUDA_VISIBLE_DEVICES on the node."""


class OpenStore(msgspec.Struct, frozen=True, tag="open_store", kw_only=True):
    """The order to open a store for the rendezvous of one restart, on this machine's own address."""

    restart: int


class RankPlacement(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a node: its rank, its local rank, and the device slot that it runs on."""

    rank: int
    local_rank: int
    device_slot: int


class StartRanks(msgspec.Struct, frozen=True, tag="start_ranks", kw_only=True):
    """The order to fork the ranks of a restart of the job of that name."""

    job: str
    restart: int
    placements: tuple[RankPlacement, ...]
    port: int
    restart_s: float | None


class KillRanks(msgspec.Struct, frozen=True, tag="kill_ranks", kw_only=True):
    """The order to kill what the restart has left."""

    restart: int


class FinishRanks(msgspec.Struct, frozen=True, tag="finish_ranks", kw_only=True):
    """The order to ask the ranks to end (SIGTERM), and to kill those that are there after the grace."""

    grace_s: float


class NodeReady(msgspec.Struct, frozen=True, tag="node_ready", kw_only=True):
    """The process that forks has imported what it needs, and has so many device slots, of which `num_wanted` are to be used."""

    num_wanted: int
    num_device_slots: int


class StoreOpened(msgspec.Struct, frozen=True, tag="store_opened", kw_only=True):
    """The store of the restart listens on this port."""

    restart: int
    port: int


class ProcessEnded(msgspec.Struct, frozen=True, tag="process_ended", kw_only=True):
    """A rank is gone: its exit code or minus its signal, what it raised, and how long ago that was. Rank -1 is the store."""

    restart: int
    rank: int
    code: int
    text: str = ""
    ago_s: float = 0.0
    is_ours: bool = False
    """Whether it was killed by order."""


class NodeIdle(msgspec.Struct, frozen=True, tag="node_idle", kw_only=True):
    """Nothing of the restart is left on this node."""

    restart: int


class RankProgress(msgspec.Struct, frozen=True, tag="rank_progress", kw_only=True):
    """How far a rank is; `first_ago_s` since its first step was done, None while it is not."""

    restart: int
    rank: int
    heartbeat: Heartbeat
    first_ago_s: float | None


class ForkScript(msgspec.Struct, frozen=True, tag="fork_script", kw_only=True):
    """The order to fork a process that runs a script with these variables; its output goes to files where they are named."""

    number: int
    target: str
    arguments: tuple[str, ...]
    is_module: bool
    environment: dict[str, str]
    stdout: str | None = None
    stderr: str | None = None


class ForkBegun(msgspec.Struct, frozen=True, tag="fork_begun", kw_only=True):
    """The process id of a script that was to be forked."""

    number: int
    pid: int


class ForkEnded(msgspec.Struct, frozen=True, tag="fork_ended", kw_only=True):
    """A forked script is gone: its exit code or minus its signal."""

    number: int
    code: int


Order = OpenStore | StartRanks | KillRanks | FinishRanks | ForkScript
Event = NodeReady | StoreOpened | ProcessEnded | NodeIdle | RankProgress | ForkBegun | ForkEnded
_MESSAGES: Final = msgspec.json.Decoder(Order | Event)


class NodeLink:
    """One end of a connection. Once the other end is gone, `is_open` is False and what is sent is lost."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_open = True
        self._unread = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Order | Event) -> None:
        try:
            self.connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self.is_open = False

    def received(self) -> list[Order | Event]:
        """Wait for messages and return them. Empty when the other end is gone, or in the middle of a line.

        The connection is closed on an end that sends what is no message, or a line without an end.
        """
        try:
            data = self.connection.recv(_READ)
        except OSError:
            data = b""
        if not data:
            self.is_open = False
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            if len(self._unread) > _MOST_UNREAD:
                raise ValueError("a line without an end")
            return [_MESSAGES.decode(line) for line in lines]
        except (ValueError, RecursionError):  # of msgspec: DecodeError, and UnicodeDecodeError
            self._unread = b""
            self.close()
            return []

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):
            self.connection.close()
