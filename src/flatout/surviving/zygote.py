"""One node's forking process: it has imported torch, runs on one thread, and forks the ranks of each epoch.

`python -m flatout.surviving.zygote SOCKET JOB`, with the descriptor of a connected socket and a JSON of a `Work`. It ends, and
kills its ranks, when the other end of the socket is closed, or when its standard input ends, which the process that started it
holds: then the memory copies are removed, too.
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
from typing import Final, NoReturn

import msgspec

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
    Ready,
    Sit,
    Start,
)
from flatout.surviving.seat import Mark, Marks, Seat

_LIFE: Final = 0
"""Standard input."""
_LOOK_S: Final = 0.05
"""How often marks are looked at."""
_BY_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch.cuda.is_available ask the driver's library for monitoring (torch's notes on CUDA): a process whose parent has asked
CUDA itself cannot use it."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What this node runs, and where its memory copies lie."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    memory: str
    node: int
    num_wanted: int
    num_slots: int
    preload: tuple[str, ...] = ()
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES as it was."""


class _Child:
    def __init__(self, rank: int, epoch: int, report: int, row: int) -> None:
        self.rank, self.epoch, self.report, self.row = rank, epoch, report, row
        self.seen = Mark()
        self.is_ours = False


class Zygote:
    """Does what it is ordered over the link."""

    def __init__(self, link: Link, work: Work) -> None:
        self._link, self._work = link, work
        self._job = ""
        self._children: dict[int, _Child] = {}
        self._marks = Marks(Path(work.memory) / "marks", max(1, work.num_slots))
        self._woken, self._wakes = os.pipe()
        self._deadline: float | None = None
        os.set_blocking(self._wakes, False)

    def serve(self) -> None:
        """Until the link is closed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what Ctrl-C means
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the wake-up below is written
        signal.set_wakeup_fd(self._wakes)
        gc.collect()
        gc.freeze()  # so that a collection in a fork copies no pages of ours
        self._tell(Ready(node=self._work.node, num_wanted=self._work.num_wanted, num_slots=self._work.num_slots))
        while self._link.is_open:
            opening = [c.report for c in self._children.values() if c.rank < 0 and c.row < 0]
            watched: list[Link | int] = [self._link, self._woken, _LIFE, *opening]
            ready, _, _ = select.select(watched, [], [], _LOOK_S)
            if _LIFE in ready:
                self._kill()
                shutil.rmtree(self._work.memory, ignore_errors=True)
                return
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            self._look()
            for child in [c for c in self._children.values() if c.report in ready]:
                self._store_opened(child)
            for order in self._link.received() if self._link in ready else ():
                self._follow(order)
            if self._deadline is not None and monotonic() > self._deadline:
                self._kill()
        self._kill()

    def _follow(self, order: object) -> None:
        match order:
            case Begin():
                self._job = order.job
            case OpenStore():
                self._fork(-1, order.epoch, -1, lambda report: _store(order.host, report))
            case Start():
                for sit in order.seats:
                    self._start(order, sit)
            case Kill():
                self._kill()
                self._tell(Idle(epoch=order.epoch))
            case Finish():
                for pid, child in self._children.items():
                    if child.rank >= 0:
                        _signal(pid, signal.SIGTERM)
                self._deadline = monotonic() + order.grace_s

    def _start(self, order: Start, sit: Sit) -> None:
        work = self._work
        environment = {
            "RANK": f"{sit.rank}",
            "LOCAL_RANK": f"{sit.local_rank}",
            "WORLD_SIZE": f"{order.num_ranks}",
            "LOCAL_WORLD_SIZE": f"{len(order.seats)}",
            "GROUP_RANK": f"{order.node_number}",
            "GROUP_WORLD_SIZE": f"{order.num_nodes}",
            "ROLE_RANK": f"{sit.rank}",
            "ROLE_WORLD_SIZE": f"{order.num_ranks}",
            "MASTER_ADDR": order.host,
            "MASTER_PORT": f"{order.port}",
            "TORCHELASTIC_RUN_ID": self._job,
            "TORCHELASTIC_RESTART_COUNT": f"{order.epoch}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        slots = [s.slot for s in order.seats]
        if slots != list(range(len(slots))):  # a spare is in use, or a slot is not
            every = work.visible.split(",") if work.visible else [str(n) for n in range(work.num_slots)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(every[slot] for slot in slots)
        row = sit.local_rank

        def run(report: int) -> NoReturn:
            from flatout.surviving.rank import become_rank

            seat = Seat(
                job=self._job,
                epoch=order.epoch,
                node=work.node,
                row=row,
                memory=Path(work.memory),
                marks=self._marks,
                restart_s=order.restart_s,
            )
            become_rank(work.target, work.arguments, work.is_module, seat, environment, report)

        self._marks.write(row, Mark())
        self._fork(sit.rank, order.epoch, row, run)

    def _fork(self, rank: int, epoch: int, row: int, run: Callable[[int], NoReturn]) -> None:
        from flatout.surviving.rank import set_apart

        report, theirs = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            set_apart(parent)
            for unwanted in (self._woken, self._wakes, report, *(c.report for c in self._children.values())):
                os.close(unwanted)
            os.close(self._link.connection.detach())
            run(theirs)
        os.close(theirs)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: it may be killed before it has done so itself
        self._children[pid] = _Child(rank, epoch, report, row)

    def _store_opened(self, child: _Child) -> None:
        said = os.read(child.report, 64)
        if said:
            child.row = 0  # has told
            self._tell(Opened(epoch=child.epoch, port=json.loads(said)))

    def _look(self) -> None:
        now = monotonic()
        for child in self._children.values():
            if child.rank < 0:
                continue
            mark = self._marks.read(child.row)
            if mark != child.seen:
                child.seen = mark
                self._tell_mark(child, now)

    def _tell_mark(self, child: _Child, now: float) -> None:
        mark = child.seen
        self._tell(
            Marked(
                epoch=child.epoch,
                rank=child.rank,
                num_steps=mark.num_steps,
                reached=mark.reached,
                resumed=mark.resumed,
                first_ago_s=now - mark.first_s if mark.first_s else None,
            )
        )

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._ended(pid, status)

    def _kill(self) -> None:
        """Kill all that is left, and wait until it is gone."""
        self._deadline = None
        self._reap()  # who has died by itself died first
        for pid, child in self._children.items():
            child.is_ours = True
            _signal(pid, signal.SIGKILL)
        for pid in list(self._children):
            self._ended(*os.waitpid(pid, 0))

    def _ended(self, pid: int, status: int) -> None:
        child = self._children.pop(pid, None)
        if child is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it has started and left in its group
        if child.rank >= 0:
            child.seen = self._marks.read(child.row)
            self._tell_mark(child, monotonic())
        os.set_blocking(child.report, False)
        said = b""
        with suppress(BlockingIOError):
            said = os.read(child.report, 1 << 16)
        os.close(child.report)
        text, at_s = json.loads(said) if said and child.rank >= 0 else ("", monotonic())
        self._tell(
            Ended(
                epoch=child.epoch,
                rank=child.rank,
                code=os.waitstatus_to_exitcode(status),
                text=text,
                ago_s=monotonic() - at_s,
                is_ours=child.is_ours,
            )
        )

    def _tell(self, event: Event) -> None:
        self._link.send(event)


def _store(host: str, report: int) -> NoReturn:
    from flatout.surviving.rank import become_store

    become_store(host, report)


def _signal(pid: int, number: int) -> None:
    """To a group and its leader."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, number)


def command(descriptor: int, work: Work) -> list[str]:
    """That starts a zygote."""
    return [sys.executable, "-m", "flatout.surviving.zygote", str(descriptor), msgspec.json.encode(work).decode()]


def environment_for(work: Work, environment: Mapping[str, str]) -> dict[str, str]:
    """One thread for each of several ranks where nothing else is said, as torchrun does; and no driver asked before the fork."""
    one = {"OMP_NUM_THREADS": "1"} if work.num_wanted > 1 else {}
    return {**one, **environment, _BY_NVML: "1"}


def main(arguments: list[str]) -> None:
    """See above."""
    connection = socket.socket(fileno=int(arguments[0]))
    work = msgspec.json.decode(arguments[1], type=Work)
    from flatout.surviving.rank import warm_up

    warm_up()
    for name in work.preload:
        importlib.import_module(name)
    sys.path.pop(0)  # python -m put our start folder there; the script's own goes first later
    Zygote(Link(connection), work).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # nothing is left to be tidied up
