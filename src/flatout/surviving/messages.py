"""What a supervisor and the zygotes of its nodes say to each other: a line of JSON each."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

import msgspec

_READ: Final = 1 << 16


class Begin(msgspec.Struct, frozen=True, tag="begin", kw_only=True):
    """First of all: the job. What is run is on each node's own command line and does not travel."""

    job: str


class OpenStore(msgspec.Struct, frozen=True, tag="store", kw_only=True):
    """Have a store for the rendezvous of one epoch, reachable at `host`."""

    epoch: int
    host: str


class Sit(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a node: its rank, its local rank, and the slot (device) that it runs on."""

    rank: int
    local_rank: int
    slot: int


class Start(msgspec.Struct, frozen=True, tag="start", kw_only=True):
    """Fork the ranks of an epoch."""

    epoch: int
    seats: tuple[Sit, ...]
    num_ranks: int
    node_number: int
    """Of this one among those that take part in the epoch."""
    num_nodes: int
    host: str
    port: int
    restart_s: float | None


class Kill(msgspec.Struct, frozen=True, tag="kill", kw_only=True):
    """Kill what the epoch has left."""

    epoch: int


class Finish(msgspec.Struct, frozen=True, tag="finish", kw_only=True):
    """Ask the ranks to end (SIGTERM), and kill what is there after the grace."""

    epoch: int
    grace_s: float


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """Of a node: it has imported what it needs, and has so many slots, of which `num_wanted` are to be used."""

    node: int
    num_wanted: int
    num_slots: int


class Opened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """The store of the epoch listens."""

    epoch: int
    port: int


class Ended(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """A rank is gone: its exit code or minus its signal, what it raised, and how long ago that was. Rank -1 is the store."""

    epoch: int
    rank: int
    code: int
    text: str = ""
    ago_s: float = 0.0
    is_ours: bool = False
    """Killed by order."""


class Idle(msgspec.Struct, frozen=True, tag="idle", kw_only=True):
    """Nothing of the epoch is left on this node."""

    epoch: int


class Marked(msgspec.Struct, frozen=True, tag="marked", kw_only=True):
    """How far a rank is; `first_ago_s` since its first step was done, None while it is not."""

    epoch: int
    rank: int
    num_steps: int
    reached: int
    resumed: int
    first_ago_s: float | None


Order = Begin | OpenStore | Start | Kill | Finish
Event = Ready | Opened | Ended | Idle | Marked
_MESSAGES: Final = msgspec.json.Decoder(
    Begin | OpenStore | Start | Kill | Finish | Ready | Opened | Ended | Idle | Marked
)


class Link:
    """One end of a conversation. Once the other end is gone, `is_open` is False and what is sent is lost."""

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
        """What has come; waits for something to come. Empty when the other end is gone, or in the middle of a line."""
        try:
            data = self.connection.recv(_READ)
        except OSError:
            data = b""
        if not data:
            self.is_open = False
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [_MESSAGES.decode(line) for line in lines]

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):
            self.connection.close()
