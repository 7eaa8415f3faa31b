"""The process that watches a job: starts its epochs, notices what fails or hangs, and starts again."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from types import FrameType
from typing import Final, Literal

import msgspec

from flatout.errors import UsageError
from flatout.surviving.account import Account, Failure
from flatout.surviving.epoch import Epoch
from flatout.surviving.messages import (
    Begin,
    Ended,
    Event,
    Finish,
    Idle,
    Kill,
    Link,
    Marked,
    Opened,
    OpenStore,
    Order,
    Ready,
    Sit,
    Start,
)
from flatout.surviving.node import Memory, Node
from flatout.surviving.policy import GivenUp, Place, Policy
from flatout.surviving.zygote import Work

_LOOK_S: Final = 0.1
_GRACE_S: Final = 10.0
"""What ranks have to end by themselves when the job is stopped."""
_DYING_S: Final = 60.0
"""What the system has to take killed processes down, with what they hold on a device; a node that takes longer is given up."""
_READY_S: Final = 180.0
"""What a node has to import torch."""
_STARTS: Final = 3
_HERE: Final = "127.0.0.1"
Outcome = Literal["finished", "gave up", "stopped"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is supervised, and how.

    A rank hangs after `hang_s` seconds without a sign of life, or `start_s` before its first; nodes have `join_s` to join.
    `least_ranks` to go on with, None for all. Raises UsageError for numbers that make no sense.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int = 1
    spares: int = 0
    nnodes: int = 1
    hang_s: float = 300.0
    start_s: float = 1800.0
    join_s: float = 60.0
    least_ranks: int | None = None
    max_restarts: int | None = None
    memory: str = "/dev/shm"
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.spares < 0 or self.nnodes < 1:
            raise UsageError(
                f"nproc {self.nproc}, spares {self.spares}, nnodes {self.nnodes}; give 1 or more, 0 or more, 1 or more"
            )
        if not (self.hang_s > 0 and self.start_s > 0):
            raise UsageError(f"hang_s {self.hang_s} and start_s {self.start_s}; give positive seconds")
        if self.least_ranks is not None and not 1 <= self.least_ranks <= self.num_ranks:
            raise UsageError(f"least_ranks is {self.least_ranks} of {self.num_ranks} ranks; give 1 to all of them")

    @property
    def num_ranks(self) -> int:
        """When nothing is lost."""
        return self.nproc * self.nnodes

    def work(self, node: int, memory: Path) -> Work:
        """One node's."""
        return Work(
            target=self.target,
            arguments=self.arguments,
            is_module=self.is_module,
            memory=str(memory),
            node=node,
            num_wanted=self.nproc,
            num_slots=self.nproc + self.spares,
            preload=self.preload,
        )


class Supervisor:
    """`Supervisor(Job(target="train.py", nproc=4)).run()`: the script on so many ranks, whatever happens to any of them.

    With several nodes, this is the first one's, and the others reach it at `listen`, a socket that listens already; `host` is
    its name for them.
    """

    def __init__(
        self,
        job: Job,
        *,
        environment: Mapping[str, str] | None = None,
        listen: socket.socket | None = None,
        host: str = _HERE,
        told: Callable[[str], None] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(f"ranks are forked and die with their parent, which needs Linux; this is {sys.platform}")
        if (job.nnodes > 1) != (listen is not None):
            raise UsageError(f"{job.nnodes} nodes: give a socket to listen at where there are several, else none")
        self._job, self._host, self._told = job, host, told or (lambda _: None)
        self._environment = os.environ if environment is None else environment
        self._listen = listen
        self._name = uuid.uuid4().hex
        self._policy = Policy(least_ranks=job.least_ranks or job.num_ranks, max_restarts=job.max_restarts)
        self._links: dict[int, Link] = {}
        self._unknown: list[Link] = []
        self._failures: list[Failure] = []
        self._recovered: set[int] = set()
        self._idle: set[int] = set()
        self._port: int | None = None
        self._number, self._num_ranks, self._began_s = 0, job.num_ranks, 0.0
        self._start_s: float | None = None
        self._is_stopping = False

    def stop(self) -> None:
        """End the job in order; may be called in a signal's handler, or another thread."""
        self._is_stopping = True

    def run(self) -> Account:
        """Until the job is finished, given up or stopped. Nothing of it is left then but what the script wrote."""
        self._began_s = monotonic()
        with Memory(Path(self._job.memory)) as memory, self._signals():
            self._node = Node(self._job.work(0, memory.path), self._environment)
            try:
                outcome, why = self._lives()
            finally:
                for link in (*self._links.values(), *self._unknown):
                    link.close()
                self._node.end()
        return Account(
            outcome=outcome,
            why=why,
            num_epochs=self._number,
            num_ranks=self._num_ranks,
            wall_s=monotonic() - self._began_s,
            start_s=self._start_s,
            failures=tuple(self._failures),
        )

    # -- epochs --------------------------------------------------------------------------------------------------------------

    def _lives(self) -> tuple[Outcome, str]:
        """Epoch after epoch. How it ended, and why."""
        try:
            while True:
                self._gather()
                if self._is_stopping:
                    return "stopped", "told to"
                epoch = self._begin()
                while not (self._is_stopping or epoch.is_finished or epoch.look(monotonic())):
                    self._pump(epoch)
                    self._note_recovery(epoch)
                if self._is_stopping:
                    self._finish(epoch)
                self._clear(epoch)
                self._note_recovery(epoch)
                if epoch.is_finished:
                    return "finished", ""
                if self._is_stopping:
                    return "stopped", "told to"
                self._note_failure(epoch)
        except GivenUp as e:
            return "gave up", str(e)

    def _gather(self) -> None:
        """Until all nodes are ready; or, after some patience, enough of them. Raises GivenUp when they are not."""
        began_s, num_starts = monotonic(), 0
        while not self._is_stopping:
            if 0 not in self._links:
                num_starts += 1
                if num_starts > _STARTS:
                    raise GivenUp(f"the process that forks the ranks ended {_STARTS} times; see what it printed")
                self._links[0] = Link(self._node.start())
                self._links[0].send(Begin(job=self._name))
            if len(self._policy.nodes) == self._job.nnodes:
                return
            waited_s = monotonic() - began_s
            is_here = 0 in self._policy.nodes
            if is_here and waited_s > self._job.join_s and len(self._policy.places) > 0:
                return
            if not is_here and waited_s > _READY_S:
                raise GivenUp(f"the process that forks the ranks was not ready after {_READY_S:.0f} s")
            self._pump(None)

    def _begin(self) -> Epoch:
        """Fork the ranks, which meet at a store of this epoch's own."""
        places = self._policy.places
        self._num_ranks = len(places)
        epoch = Epoch(self._number, places, began_s=monotonic(), hang_s=self._job.hang_s, start_s=self._job.start_s)
        self._number += 1
        self._port = None
        self._links[0].send(OpenStore(epoch=epoch.number, host=self._host))
        while self._port is None and not epoch.look(monotonic()) and not self._is_stopping:
            self._pump(epoch)
        nodes = sorted({place.node for place in places})
        if self._port is None or any(node not in self._links for node in nodes):
            return epoch
        back = [f.recovery_s for f in self._failures if f.recovery_s is not None]
        for number, node in enumerate(nodes):
            mine = [(rank, place.slot) for rank, place in enumerate(places) if place.node == node]
            start = Start(
                epoch=epoch.number,
                seats=tuple(Sit(rank, local, slot) for local, (rank, slot) in enumerate(mine)),
                num_ranks=len(places),
                node_number=number,
                num_nodes=len(nodes),
                host=self._host,
                port=self._port,
                restart_s=median(back) if back else self._start_s,
            )
            self._links[node].send(start)
        return epoch

    def _finish(self, epoch: Epoch) -> None:
        """Ask the ranks to end, and wait for it a while."""
        for link in self._links.values():
            link.send(Finish(epoch=epoch.number, grace_s=_GRACE_S))
        deadline_s = monotonic() + _GRACE_S
        while epoch.num_left and monotonic() < deadline_s:
            self._pump(epoch)

    def _clear(self, epoch: Epoch) -> None:
        """Kill what is left, on all nodes, and wait until it is gone. A node that does not answer is given up."""
        self._idle = set()
        for link in self._links.values():
            link.send(Kill(epoch=epoch.number))
        deadline_s = monotonic() + _DYING_S
        while self._links.keys() - self._idle and monotonic() < deadline_s:
            self._pump(epoch)
        for node in self._links.keys() - self._idle:
            self._lose(node, epoch)

    # -- what happened -------------------------------------------------------------------------------------------------------

    def _note_recovery(self, epoch: Epoch) -> None:
        at_s = epoch.recovered_s
        if at_s is None or epoch.number in self._recovered:
            return
        self._recovered.add(epoch.number)
        since_s = at_s - self._began_s
        if self._start_s is None:
            self._start_s = since_s
        for number, failure in enumerate(self._failures):
            if failure.recovery_s is None:
                self._failures[number] = msgspec.structs.replace(
                    failure, recovery_s=since_s - failure.at_s, resumed=epoch.resumed
                )
                self._told(f"recovered after {since_s - failure.at_s:.1f} s, from step {epoch.resumed}")

    def _note_failure(self, epoch: Epoch) -> None:
        """Raises GivenUp."""
        cause = epoch.cause
        place = epoch.places[cause.rank] if cause.rank >= 0 else Place(-1, -1)
        failure = Failure(
            epoch=epoch.number,
            rank=cause.rank,
            node=place.node,
            slot=place.slot,
            kind=cause.kind,
            text=cause.text,
            at_s=cause.at_s - self._began_s,
            reached=epoch.reached,
        )
        self._failures.append(failure)
        self._told(f"{cause.text}; reached step {epoch.reached}")
        self._policy.failed(failure, progress=epoch.progress)

    # -- among nodes ---------------------------------------------------------------------------------------------------------

    def _pump(self, epoch: Epoch | None) -> None:
        """Hear what nodes tell; wait a little for it."""
        everyone: list[Link | socket.socket] = [*self._links.values(), *self._unknown]
        if self._listen is not None:
            everyone.append(self._listen)
        ready, _, _ = select.select(everyone, [], [], _LOOK_S)
        for node, link in list(self._links.items()):
            for event in link.received() if link in ready else ():
                self._hear(node, event, epoch)
            if not link.is_open:
                self._lose(node, epoch)
        for link in [link for link in self._unknown if link in ready]:
            self._welcome(link)
        if self._listen is not None and self._listen in ready:
            newcomer = Link(self._listen.accept()[0])
            newcomer.send(Begin(job=self._name))
            self._unknown.append(newcomer)

    def _welcome(self, link: Link) -> None:
        """A node says who it is. One whose number is taken or not foreseen is sent away."""
        self._unknown.remove(link)
        events = link.received()
        first = events[0] if events else None
        if not isinstance(first, Ready) or first.node in self._links or not 0 < first.node < self._job.nnodes:
            link.close()
            return
        self._links[first.node] = link
        for event in events:
            self._hear(first.node, event, None)

    def _hear(self, node: int, event: Order | Event, epoch: Epoch | None) -> None:
        now_s = monotonic()
        match event:
            case Ready():
                self._policy.join(node, num_wanted=event.num_wanted, num_slots=event.num_slots)
            case Opened() if epoch is not None and event.epoch == epoch.number:
                self._port = event.port
            case Marked() if epoch is not None and event.epoch == epoch.number:
                epoch.mark(event, now_s)
            case Ended() if epoch is not None and event.epoch == epoch.number:
                epoch.end(event, now_s)
            case Idle() if epoch is not None and event.epoch == epoch.number:
                self._idle.add(node)
            case _:
                pass  # of an epoch that is over

    def _lose(self, node: int, epoch: Epoch | None) -> None:
        self._links.pop(node).close()
        self._policy.leave(node)
        if epoch is not None:
            epoch.lose(node, monotonic())
        if node == 0:
            self._node.kill()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the job in order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, was in before.items():
                signal.signal(number, was)
