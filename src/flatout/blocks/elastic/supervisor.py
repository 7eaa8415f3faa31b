"""The process that watches a job: starts its ranks, notices what fails or hangs, and starts again."""

from __future__ import annotations

import os
import select
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Final, Literal

import msgspec

from flatout.blocks.elastic.messages import (
    Event,
    FinishRanks,
    Job,
    KillRanks,
    NodeIdle,
    NodeLink,
    NodeReady,
    NodeWork,
    OpenStore,
    Order,
    ProcessEnded,
    RankPlacement,
    RankProgress,
    StartRanks,
    StoreOpened,
)
from flatout.blocks.elastic.node import Node, NodeMemory, ending_signals
from flatout.blocks.elastic.policy import Failure, JobAbandoned, JobReport, Policy, RankPlace, Restart
from flatout.core.errors import UsageError

_POLL_S: Final = 0.1
_GRACE_S: Final = 10.0
"""Seconds that ranks have to end by themselves when the job is stopped."""
_DYING_S: Final = 60.0
"""Seconds that the system has to take killed processes down, with what they hold on a device; then a node counts as lost."""
_READY_S: Final = 180.0
"""Seconds that a node has to import torch."""
_STARTS: Final = 3
_HERE: Final = "127.0.0.1"
Outcome = Literal["finished", "gave up", "stopped"]


class Supervisor:
    """Runs a script on several ranks, and starts it again when any of them fails.

    For example `Supervisor(Job(target="train.py", nproc=4)).run()`.

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
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(f"ranks are forked and die with their parent, which needs Linux; this is {sys.platform}")
        if (job.nnodes > 1) != (listen is not None):
            raise UsageError(f"{job.nnodes} nodes: give a socket to listen at where there are several, else none")
        self._job, self._host, self._on_progress = job, host, on_progress or (lambda _: None)
        self._environment = os.environ if environment is None else environment
        self._listen = listen
        self._name = uuid.uuid4().hex
        self._policy = Policy(least_ranks=job.least_ranks or job.num_ranks, max_restarts=job.max_restarts)
        self._links: dict[int, NodeLink] = {}
        self._unknown: list[NodeLink] = []
        self._failures: list[Failure] = []
        self._recovered: set[int] = set()
        self._idle: set[int] = set()
        self._port: int | None = None
        self._number, self._num_ranks, self._began_s = 0, job.num_ranks, 0.0
        self._start_s: float | None = None
        self._is_stopping = False

    def stop(self) -> None:
        """End the job in order. May be called in a signal's handler, or another thread."""
        self._is_stopping = True

    def run(self) -> JobReport:
        """Run until the job is finished, abandoned or stopped. Nothing of it is left then but what the script wrote."""
        self._began_s = monotonic()
        with NodeMemory(Path(self._job.memory)) as memory, ending_signals(lambda _: self.stop()):
            self._node = Node(NodeWork(job=self._job, node=0, memory=str(memory.path)), self._environment)
            try:
                outcome, why = self._run_restarts()
            finally:
                for link in (*self._links.values(), *self._unknown):
                    link.close()
                self._node.end()
        return JobReport(
            outcome=outcome,
            why=why,
            num_starts=self._number,
            num_ranks=self._num_ranks,
            wall_s=monotonic() - self._began_s,
            start_s=self._start_s,
            failures=tuple(self._failures),
        )

    # -- restarts ------------------------------------------------------------------------------------------------------------

    def _run_restarts(self) -> tuple[Outcome, str]:
        """Start the job until it need not be started again. How it ended, and why."""
        try:
            while True:
                self._gather()
                if self._is_stopping:
                    return "stopped", "on request"
                restart = self._begin()
                while not (self._is_stopping or restart.is_finished or restart.has_failed(monotonic())):
                    self._pump(restart)
                    self._note_recovery(restart)
                if self._is_stopping:
                    self._finish(restart)
                self._clear(restart)
                self._note_recovery(restart)
                if restart.is_finished:
                    return "finished", ""
                if self._is_stopping:
                    return "stopped", "on request"
                self._note_failure(restart)
        except JobAbandoned as e:
            return "gave up", str(e)

    def _gather(self) -> None:
        """Wait until all nodes are ready; or, after some patience, enough of them. Raises JobAbandoned when they are not."""
        began_s, num_starts = monotonic(), 0
        while not self._is_stopping:
            if 0 not in self._links:
                num_starts += 1
                if num_starts > _STARTS:
                    raise JobAbandoned(f"the process that forks the ranks ended {_STARTS} times; see what it printed")
                self._links[0] = NodeLink(self._node.start())
            if len(self._policy.nodes) == self._job.nnodes:
                return
            waited_s = monotonic() - began_s
            is_here = 0 in self._policy.nodes
            if is_here and waited_s > self._job.join_s and len(self._policy.places) > 0:
                return
            if not is_here and waited_s > _READY_S:
                raise JobAbandoned(f"the process that forks the ranks was not ready after {_READY_S:.0f} s")
            self._pump(None)

    def _begin(self) -> Restart:
        """Fork the ranks, which meet at a store of this restart's own."""
        places = self._policy.places
        self._num_ranks = len(places)
        restart = Restart(self._number, places, began_s=monotonic(), hang_s=self._job.hang_s, start_s=self._job.start_s)
        self._number += 1
        self._port = None
        self._links[0].send(OpenStore(restart=restart.number, host=self._host))
        while self._port is None and not restart.has_failed(monotonic()) and not self._is_stopping:
            self._pump(restart)
        nodes = sorted({place.node for place in places})
        if self._port is None or any(node not in self._links for node in nodes):
            return restart
        back = [f.recovery_s for f in self._failures if f.recovery_s is not None]
        for number, node in enumerate(nodes):
            mine = [(rank, place.device_slot) for rank, place in enumerate(places) if place.node == node]
            placements = (RankPlacement(rank, local, device_slot) for local, (rank, device_slot) in enumerate(mine))
            start = StartRanks(
                job=self._name,
                restart=restart.number,
                placements=tuple(placements),
                num_ranks=len(places),
                node_number=number,
                num_nodes=len(nodes),
                host=self._host,
                port=self._port,
                restart_s=median(back) if back else self._start_s,
            )
            self._links[node].send(start)
        return restart

    def _finish(self, restart: Restart) -> None:
        """Ask the ranks to end, and wait for that a while."""
        for link in self._links.values():
            link.send(FinishRanks(grace_s=_GRACE_S))
        deadline_s = monotonic() + _GRACE_S
        while restart.num_left and monotonic() < deadline_s:
            self._pump(restart)

    def _clear(self, restart: Restart) -> None:
        """Kill what is left, on all nodes, and wait until it is gone. A node that does not answer is counted as lost."""
        self._idle = set()
        for link in self._links.values():
            link.send(KillRanks(restart=restart.number))
        deadline_s = monotonic() + _DYING_S
        while self._links.keys() - self._idle and monotonic() < deadline_s:
            self._pump(restart)
        for node in self._links.keys() - self._idle:
            self._lose(node, restart)

    # -- what happened -------------------------------------------------------------------------------------------------------

    def _note_recovery(self, restart: Restart) -> None:
        at_s = restart.recovered_s
        if at_s is None or restart.number in self._recovered:
            return
        self._recovered.add(restart.number)
        since_s = at_s - self._began_s
        if self._start_s is None:
            self._start_s = since_s
        for number, failure in enumerate(self._failures):
            if failure.recovery_s is None:
                self._failures[number] = msgspec.structs.replace(
                    failure, recovery_s=since_s - failure.at_s, resumed=restart.resumed
                )
                self._on_progress(f"recovered after {since_s - failure.at_s:.1f} s, from step {restart.resumed}")

    def _note_failure(self, restart: Restart) -> None:
        """Record a failure. Raises JobAbandoned when the job is not to be started again."""
        cause = restart.cause
        place = restart.places[cause.rank] if cause.rank >= 0 else RankPlace(-1, -1)
        failure = Failure(
            restart=restart.number,
            rank=cause.rank,
            node=place.node,
            device_slot=place.device_slot,
            kind=cause.kind,
            text=cause.text,
            at_s=cause.at_s - self._began_s,
            reached=restart.reached,
        )
        self._failures.append(failure)
        self._on_progress(f"{cause.text}; reached step {restart.reached}")
        self._policy.failed(failure, progress=restart.progress)

    # -- among nodes ---------------------------------------------------------------------------------------------------------

    def _pump(self, restart: Restart | None) -> None:
        """Wait a little for messages of nodes, and handle them."""
        everyone: list[NodeLink | socket.socket] = [*self._links.values(), *self._unknown]
        if self._listen is not None:
            everyone.append(self._listen)
        ready, _, _ = select.select(everyone, [], [], _POLL_S)
        for node, link in list(self._links.items()):
            for event in link.received() if link in ready else ():
                self._handle(node, event, restart)
            if not link.is_open:
                self._lose(node, restart)
        for link in [link for link in self._unknown if link in ready]:
            self._welcome(link)
        if self._listen is not None and self._listen in ready:
            self._unknown.append(NodeLink(self._listen.accept()[0]))

    def _welcome(self, link: NodeLink) -> None:
        """Handle the first message of a node. One whose number is taken or not foreseen is sent away."""
        self._unknown.remove(link)
        events = link.received()
        first = events[0] if events else None
        if not isinstance(first, NodeReady) or first.node in self._links or not 0 < first.node < self._job.nnodes:
            link.close()
            return
        self._links[first.node] = link
        for event in events:
            self._handle(first.node, event, None)

    def _handle(self, node: int, event: Order | Event, restart: Restart | None) -> None:
        now_s = monotonic()
        match event:
            case NodeReady():
                self._policy.join(node, num_wanted=event.num_wanted, num_device_slots=event.num_device_slots)
            case StoreOpened() if restart is not None and event.restart == restart.number:
                self._port = event.port
            case RankProgress() if restart is not None and event.restart == restart.number:
                restart.record_progress(event, now_s)
            case ProcessEnded() if restart is not None and event.restart == restart.number:
                restart.record_end(event, now_s)
            case NodeIdle() if restart is not None and event.restart == restart.number:
                self._idle.add(node)
            case _:
                pass  # of a restart that is over

    def _lose(self, node: int, restart: Restart | None) -> None:
        self._links.pop(node).close()
        self._policy.leave(node)
        if restart is not None:
            restart.record_lost_node(node, monotonic())
        if node == 0:
            self._node.kill()
