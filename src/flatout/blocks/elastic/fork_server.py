"""One node's fork server: a process with one thread that has imported torch and forks the ranks of each restart.

`python -m flatout.blocks.elastic.fork_server SOCKET JOB`, with the descriptor of a connected socket and a JSON of a `NodeWork`.
It ends, and kills its ranks, when the other end of the socket is closed, or when its standard input ends, which the process that
started it has open: then the memory copies are removed, too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from flatout.blocks.elastic.messages import (
    FinishRanks,
    Heartbeat,
    HeartbeatPage,
    KillRanks,
    NodeIdle,
    NodeLink,
    NodeReady,
    NodeWork,
    OpenStore,
    ProcessEnded,
    RankContext,
    RankPlacement,
    RankProgress,
    StartRanks,
    StoreOpened,
)
from flatout.core.runtime.fork_server import CHECK_CUDA_BY_NVML, ForkedChildren
from flatout.core.secrets import redacted_text

_PARENT_PIPE: Final = 0
"""Standard input, which ends when the parent does."""
_POLL_S: Final = 0.05
"""How often heartbeats are read."""


class _ForkedProcess:
    def __init__(self, rank: int, restart: int, report: int, row: int) -> None:
        self.rank, self.restart, self.report, self.row = rank, restart, report, row
        self.heartbeat = Heartbeat()
        self.is_ours = False


class ForkServer:
    """Forks, watches and kills ranks as it is ordered over the link."""

    def __init__(self, link: NodeLink, work: NodeWork) -> None:
        self._link, self._work = link, work
        self._children: ForkedChildren[_ForkedProcess] = ForkedChildren()
        self._heartbeats = HeartbeatPage(Path(work.memory) / "heartbeats", work.job.num_device_slots)
        self._deadline: float | None = None

    def serve(self) -> None:
        """Carry out orders until the link is closed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._children.watch()
        gc.collect()
        gc.freeze()  # so that a collection in a fork copies no pages of ours
        job = self._work.job
        self._link.send(NodeReady(num_wanted=job.nproc, num_device_slots=job.num_device_slots))
        while self._link.is_open:
            children = self._children.by_pid.values()
            opening = [c.report for c in children if c.rank < 0 and c.row < 0]
            watched: list[NodeLink | ForkedChildren[_ForkedProcess] | int]
            watched = [self._link, self._children, _PARENT_PIPE, *opening]
            ready, _, _ = select.select(watched, [], [], _POLL_S)
            if _PARENT_PIPE in ready:
                self._kill()
                shutil.rmtree(self._work.memory, ignore_errors=True)
                return
            self._reap()
            self._read_heartbeats()
            for child in [c for c in children if c.report in ready]:
                self._store_opened(child)
            for order in self._link.received() if self._link in ready else ():
                self._follow(order)
            if self._deadline is not None and monotonic() > self._deadline:
                self._kill()
        self._kill()

    def _follow(self, order: object) -> None:
        match order:
            case OpenStore():
                self._fork(-1, order.restart, -1, _run_store)
            case StartRanks():
                for placement in order.placements:
                    self._start(order, placement)
            case KillRanks():
                self._kill()
                self._link.send(NodeIdle(restart=order.restart))
            case FinishRanks():
                for pid, child in self._children.by_pid.items():
                    if child.rank >= 0:
                        _signal(pid, signal.SIGTERM)
                self._deadline = monotonic() + order.grace_s

    def _start(self, order: StartRanks, placement: RankPlacement) -> None:
        work = self._work
        environment = {
            "RANK": f"{placement.rank}",
            "LOCAL_RANK": f"{placement.local_rank}",
            "WORLD_SIZE": f"{len(order.placements)}",
            "LOCAL_WORLD_SIZE": f"{len(order.placements)}",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": f"{placement.rank}",
            "ROLE_WORLD_SIZE": f"{len(order.placements)}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{order.port}",
            "TORCHELASTIC_RUN_ID": order.job,
            "TORCHELASTIC_RESTART_COUNT": f"{order.restart}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        device_slots = [p.device_slot for p in order.placements]
        if device_slots != list(range(len(device_slots))):  # a spare is in use, or one is not
            every = work.visible.split(",") if work.visible else [str(n) for n in range(work.job.num_device_slots)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[index] for index in device_slots)
        row = placement.local_rank

        def run(report: int) -> int:
            from flatout.blocks.elastic.rank import become_rank

            context = RankContext(
                job=order.job,
                restart=order.restart,
                node=0,
                row=row,
                memory=Path(work.memory),
                heartbeats=self._heartbeats,
                restart_s=order.restart_s,
            )
            return become_rank(work, context, environment, report)

        self._heartbeats.write(row, Heartbeat())
        self._fork(placement.rank, order.restart, row, run)

    def _fork(self, rank: int, restart: int, row: int, run: Callable[[int], int]) -> None:
        report, theirs = os.pipe()

        def become() -> int:
            self._link.connection.detach()
            os.setpgid(0, 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            return run(theirs)

        reports = (report, *(c.report for c in self._children.by_pid.values()))
        pid = self._children.fork(
            _ForkedProcess(rank, restart, report, row), become, closing=(self._link.fileno(), *reports)
        )
        os.close(theirs)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: it may be killed before it has done so itself

    def _store_opened(self, child: _ForkedProcess) -> None:
        message = os.read(child.report, 64)
        if message:
            child.row = 0  # its port is known
            self._link.send(StoreOpened(restart=child.restart, port=json.loads(message)))

    def _read_heartbeats(self) -> None:
        now = monotonic()
        for child in self._children.by_pid.values():
            if child.rank < 0:
                continue
            heartbeat = self._heartbeats.read(child.row)
            if heartbeat != child.heartbeat:
                child.heartbeat = heartbeat
                self._report_progress(child, now)

    def _report_progress(self, child: _ForkedProcess, now: float) -> None:
        heartbeat = child.heartbeat
        first_ago_s = now - heartbeat.first_s if heartbeat.first_s else None
        self._link.send(
            RankProgress(restart=child.restart, rank=child.rank, heartbeat=heartbeat, first_ago_s=first_ago_s)
        )

    def _reap(self) -> None:
        for pid, child, code in self._children.reap():
            self._ended(pid, child, code)

    def _kill(self) -> None:
        """Kill all that is left, and wait until it is gone."""
        self._deadline = None
        self._reap()  # who has died by itself died first
        for pid, child in self._children.by_pid.items():
            child.is_ours = True
            _signal(pid, signal.SIGKILL)
        for pid, child, code in self._children.reap_all():
            self._ended(pid, child, code)

    def _ended(self, pid: int, child: _ForkedProcess, code: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it has started and left in its group
        if child.rank >= 0:
            child.heartbeat = self._heartbeats.read(child.row)
            self._report_progress(child, monotonic())
        os.set_blocking(child.report, False)
        message = b""
        with suppress(BlockingIOError):
            message = os.read(child.report, 1 << 16)
        os.close(child.report)
        text, at_s = json.loads(message) if message and child.rank >= 0 else ("", monotonic())
        self._link.send(
            ProcessEnded(
                restart=child.restart,
                rank=child.rank,
                code=code,
                text=redacted_text(text),
                ago_s=monotonic() - at_s,
                is_ours=child.is_ours,
            )
        )


def _run_store(report: int) -> int:
    from flatout.blocks.elastic.rank import become_store

    become_store(report)


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process group and its leader."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def server_command(descriptor: int, work: NodeWork) -> list[str]:
    """The command line of a fork server that is connected over that descriptor."""
    module = "flatout.blocks.elastic.fork_server"
    return [sys.executable, "-m", module, str(descriptor), msgspec.json.encode(work).decode()]


def environment_for(work: NodeWork, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a fork server: one thread per rank where there are several, as with torchrun; CUDA is not asked yet.

    All ranks are here: so gloo and NCCL listen where no other machine reaches them.
    """
    one = {"OMP_NUM_THREADS": "1"} if work.job.nproc > 1 else {}
    here = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**one, **here, **environment, CHECK_CUDA_BY_NVML: "1"}


def main(arguments: list[str]) -> None:
    """Import what ranks need, and serve; `arguments` are the descriptor and the work."""
    connection = socket.socket(fileno=int(arguments[0]))
    work = msgspec.json.decode(arguments[1], type=NodeWork)
    from flatout.blocks.elastic.rank import warm_up

    warm_up()
    for name in work.job.preload:
        importlib.import_module(name)
    sys.path.pop(0)  # python -m put our start folder there; the script's own goes first later
    ForkServer(NodeLink(connection), work).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # nothing is left to be tidied up
