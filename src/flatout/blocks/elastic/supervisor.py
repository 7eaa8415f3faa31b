"""The process that watches a job: starts its ranks, notices what fails or hangs, and starts again."""

from __future__ import annotations

import os
import select
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
_NODE: Final = 0
"""The number of this machine among those of a job."""
LEFT: Final = "a rank was asked to end; the state is saved"
"""Why a job has stopped that its scheduler wanted to end."""
Outcome = Literal["finished", "gave up", "stopped"]


class Supervisor:
    """Runs a script on several ranks of this machine, and starts it again when any of them fails.

    For example `Supervisor(Job(target="train.py", nproc=4)).run()`. Of several machines, `flatout-torchrun` runs one node each.
    """

    def __init__(
        self,
        job: Job,
        *,
        environment: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(f"ranks are forked and die with their parent, which needs Linux; this is {sys.platform}")
        self._job, self._on_progress = job, on_progress or (lambda _: None)
        self._environment = os.environ if environment is None else environment
        self._name = uuid.uuid4().hex
        self._policy = Policy(least_ranks=job.least_ranks or job.nproc, max_restarts=job.max_restarts)
        self._link: NodeLink | None = None
        self._failures: list[Failure] = []
        self._recovered: set[int] = set()
        self._is_idle = False
        self._port: int | None = None
        self._number, self._num_ranks, self._began_s = 0, job.nproc, 0.0
        self._start_s: float | None = None
        self._is_stopping = False

    def stop(self) -> None:
        """End the job in order. May be called in a signal's handler, or another thread."""
        self._is_stopping = True

    def run(self) -> JobReport:
        """Run until the job is finished, abandoned or stopped. Nothing of it is left then but what the script wrote."""
        self._began_s = monotonic()
        with NodeMemory(Path(self._job.memory)) as memory, ending_signals(lambda _: self.stop()):
            self._node = Node(NodeWork(job=self._job, memory=str(memory.path)), self._environment)
            try:
                outcome, why = self._run_restarts()
            finally:
                if self._link is not None:
                    self._link.close()
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
                if restart.has_left:
                    return "stopped", LEFT
                self._note_failure(restart)
        except JobAbandoned as e:
            return "gave up", str(e)

    def _gather(self) -> None:
        """Wait until the process that forks the ranks is ready. Raises JobAbandoned when it is not."""
        began_s, num_starts = monotonic(), 0
        while not self._is_stopping:
            if self._link is None:
                num_starts += 1
                if num_starts > _STARTS:
                    raise JobAbandoned(f"the process that forks the ranks ended {_STARTS} times; see what it printed")
                self._link = NodeLink(self._node.start())
            if self._policy.nodes:
                return
            if monotonic() - began_s > _READY_S:
                raise JobAbandoned(f"the process that forks the ranks was not ready after {_READY_S:.0f} s")
            self._pump(None)

    def _begin(self) -> Restart:
        """Fork the ranks, which meet at a store of this restart's own."""
        places = self._policy.places
        self._num_ranks = len(places)
        restart = Restart(self._number, places, began_s=monotonic(), hang_s=self._job.hang_s, start_s=self._job.start_s)
        self._number += 1
        self._port = None
        self._send(OpenStore(restart=restart.number))
        while self._port is None and not restart.has_failed(monotonic()) and not self._is_stopping:
            self._pump(restart)
        if self._port is None:
            return restart
        back = [f.recovery_s for f in self._failures if f.recovery_s is not None]
        placements = (RankPlacement(rank, rank, place.device_slot) for rank, place in enumerate(places))
        self._send(
            StartRanks(
                job=self._name,
                restart=restart.number,
                placements=tuple(placements),
                port=self._port,
                restart_s=median(back) if back else self._start_s,
            )
        )
        return restart

    def _send(self, order: Order) -> None:
        if self._link is not None:
            self._link.send(order)

    def _finish(self, restart: Restart) -> None:
        """Ask the ranks to end, and wait for that a while."""
        self._send(FinishRanks(grace_s=_GRACE_S))
        deadline_s = monotonic() + _GRACE_S
        while restart.num_left and monotonic() < deadline_s:
            self._pump(restart)

    def _clear(self, restart: Restart) -> None:
        """Kill what is left, and wait until it is gone. Where that is not said in time, the process that forks is killed, too."""
        self._is_idle = False
        self._send(KillRanks(restart=restart.number))
        deadline_s = monotonic() + _DYING_S
        while self._link is not None and not self._is_idle and monotonic() < deadline_s:
            self._pump(restart)
        if not self._is_idle:
            self._lose(restart)

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

    # -- the process that forks ----------------------------------------------------------------------------------------------

    def _pump(self, restart: Restart | None) -> None:
        """Wait a little for messages of the process that forks, and handle them."""
        link = self._link
        if link is None:
            return
        ready, _, _ = select.select([link], [], [], _POLL_S)
        for event in link.received() if ready else ():
            self._handle(event, restart)
        if not link.is_open:
            self._lose(restart)

    def _handle(self, event: Order | Event, restart: Restart | None) -> None:
        now_s = monotonic()
        match event:
            case NodeReady():
                self._policy.join(_NODE, num_wanted=event.num_wanted, num_device_slots=event.num_device_slots)
            case StoreOpened() if restart is not None and event.restart == restart.number:
                self._port = event.port
            case RankProgress() if restart is not None and event.restart == restart.number:
                restart.record_progress(event, now_s)
            case ProcessEnded() if restart is not None and event.restart == restart.number:
                restart.record_end(event, now_s)
            case NodeIdle() if restart is not None and event.restart == restart.number:
                self._is_idle = True
            case _:
                pass  # of a restart that is over

    def _lose(self, restart: Restart | None) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._policy.leave(_NODE)
        if restart is not None:
            restart.record_lost_node(_NODE, monotonic())
        self._node.kill()
