"""The starts of a job: what happened in each, which rank runs where in the next, and when to stop; without any process."""

from __future__ import annotations

import re
import signal
from statistics import median
from typing import Final, Literal, NamedTuple

from flatout.blocks.elastic.messages import ProcessEnded, RankProgress
from flatout.blocks.elastic.preemption import EXIT_CODE
from flatout.core.errors import UsageError
from flatout.core.records.record import Record

FailureKind = Literal["signal", "exception", "hang", "node", "store", "left"]


class Failure(Record, frozen=True, kw_only=True):
    """One failure of a job. `rank` is the one that failed first, -1 where none did; `text` is how.

    `recovery_s` from the failure until every rank has done a step again, `steps_lost` of the steps that any rank had passed to
    `keep`; both None where the job did not get that far.
    """

    restart: int
    """How often the job had been started again by then."""
    rank: int
    node: int
    device_slot: int
    kind: FailureKind
    text: str
    at_s: float
    """Seconds since the job began."""
    reached: int
    """The newest step that any rank had passed to `keep`; -1 before the first."""
    recovery_s: float | None = None
    resumed: int | None = None

    @property
    def steps_lost(self) -> int | None:
        """Steps that were done and are done again."""
        if self.resumed is None or self.resumed < 0 or self.reached < 0:
            return None
        return max(0, self.reached - self.resumed)


class JobReport(Record, frozen=True, kw_only=True):
    """How a supervised job went. `why` is the reason where the job was abandoned or stopped."""

    outcome: Literal["finished", "gave up", "stopped"]
    why: str = ""
    num_starts: int = 0
    """How often its ranks were started; 0 in files of earlier versions."""
    num_ranks: int
    """The number of ranks at the last start."""
    wall_s: float
    start_s: float | None
    """Seconds from the beginning until every rank had done its first step."""
    failures: tuple[Failure, ...]

    @property
    def recoveries_s(self) -> tuple[float, ...]:
        """Seconds of each failure after which every rank did a step again."""
        return tuple(f.recovery_s for f in self.failures if f.recovery_s is not None)

    def summary(self) -> str:
        """The report in one line.

        >>> JobReport(outcome="finished", num_starts=1, num_ranks=4, wall_s=9.0, start_s=2.0, failures=()).summary()
        'finished on 4 ranks after 9.0 s without a failure'
        """
        line = f"{self.outcome} on {self.num_ranks} ranks after {self.wall_s:.1f} s"
        num, back = len(self.failures), self.recoveries_s
        line += f" and {num} failure{'s' if num > 1 else ''}" if num else " without a failure"
        if back:
            line += f"; recovered in {median(back):.1f} s (median), {max(back):.1f} s (longest)"
        return line + (f": {self.why}" if self.why else "")


PATIENCE: Final = 3
"""Exceptions in a row without progress that count as a bug; failures in a row after which a device slot is excluded."""
_MORE_PATIENCE: Final = 10
"""Other failures in a row without progress: a machine may kill for a while."""


class RankPlace(NamedTuple):
    """Where one rank runs: the node, and the device slot of that node."""

    node: int
    device_slot: int


class JobAbandoned(Exception):
    """The job is not started again; the message is the reason."""


class Policy:
    """Counts failures: `places` is where ranks run at the next start; `failed` raises JobAbandoned where there is to be none."""

    def __init__(self, *, least_ranks: int, max_restarts: int | None = None) -> None:
        if least_ranks < 1 or (max_restarts is not None and max_restarts < 0):
            raise UsageError(
                f"least_ranks is {least_ranks}, max_restarts {max_restarts}; give 1 or more, and 0 or more"
            )
        self._least, self._max = least_ranks, max_restarts
        self._device_slots: dict[int, tuple[int, list[int]]] = {}
        self._failures: list[Failure] = []
        self._best = -1
        self._same = 0
        self._blamed: tuple[RankPlace, int] = (RankPlace(-1, -1), 0)

    def join(self, node: int, *, num_wanted: int, num_device_slots: int) -> None:
        """Record that a node is there, with so many device slots that work."""
        self._device_slots[node] = (num_wanted, list(range(num_device_slots)))

    def leave(self, node: int) -> None:
        """Record that a node is gone."""
        self._device_slots.pop(node, None)

    @property
    def nodes(self) -> list[int]:
        """The numbers of the nodes that are there."""
        return sorted(self._device_slots)

    @property
    def places(self) -> list[RankPlace]:
        """Where each rank runs, by rank. Raises JobAbandoned when there are fewer than the least."""
        found = [
            RankPlace(node, device_slot)
            for node, (wanted, device_slots) in sorted(self._device_slots.items())
            for device_slot in device_slots[:wanted]
        ]
        if len(found) < self._least:
            raise JobAbandoned(f"{len(found)} ranks are left of the {self._least} that are needed at least")
        return found

    def failed(self, failure: Failure, *, progress: int) -> None:
        """Record a failure after so much progress (steps). Raises JobAbandoned when the job is not to be started again."""
        self._failures.append(failure)
        if progress > self._best:
            self._best, self._same = progress, 0
        self._same += 1
        if self._max is not None and len(self._failures) > self._max:
            raise JobAbandoned(f"it was started again {self._max} times, as often as allowed; last: {failure.text}")
        if self._excludes_device(failure):
            self._same = 0
            return
        recent = self._failures[-self._same :]
        if self._same >= PATIENCE and all(f.kind == "exception" for f in recent[-PATIENCE:]):
            raise JobAbandoned(
                f"{PATIENCE} times in a row without a step of progress, rank {failure.rank}: {failure.text}"
            )
        if self._same >= _MORE_PATIENCE:
            raise JobAbandoned(f"{self._same} failures in a row without a step of progress; last: {failure.text}")

    def _excludes_device(self, failure: Failure) -> bool:
        """Exclude a device slot that has failed too often: another replaces it, or there are fewer ranks. Whether one was.

        An exception may be a bug, which would fail anywhere: for it a device slot is excluded only where there is a spare.
        """
        place = RankPlace(failure.node, failure.device_slot)
        if failure.device_slot < 0:
            self._blamed = (place, 0)
            return False
        self._blamed = (place, self._blamed[1] + 1 if self._blamed[0] == place else 1)
        wanted, device_slots = self._device_slots.get(place.node, (0, []))
        if self._blamed[1] < PATIENCE or place.device_slot not in device_slots:
            return False
        has_spare = len(device_slots) > wanted
        num_after = len(self.places) - (0 if has_spare else 1)
        if num_after < self._least or (failure.kind == "exception" and not has_spare):
            return False
        device_slots.remove(place.device_slot)
        self._blamed = (RankPlace(-1, -1), 0)
        return True


# -- one start of a job ------------------------------------------------------------------------------------------------------


_LOST: Final = re.compile(r"Connection (closed|reset|refused)|connectFullMesh|Broken pipe|DistNetworkError|NCCL error")
"""The errors that ranks raise because another one is gone (gloo, the store, NCCL)."""
_LEAVING_S: Final = 60.0
"""How long ranks have to write their state when one has already left."""
_ROOT_S: Final = 1.0
"""How long such an error waits for the one that caused it: a rank that raises closes its groups before it can report."""


class FailureCause(NamedTuple):
    """The failure that came first. `rank` is -1 where no single rank failed."""

    rank: int
    kind: FailureKind
    text: str
    at_s: float

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because it cannot reach another."""
        return self.kind == "exception" and _LOST.search(self.text) is not None


class Restart:
    """What is known of the ranks since one start of the job, number 0 the first. Times are those of the supervisor's clock."""

    def __init__(self, number: int, places: list[RankPlace], *, began_s: float, hang_s: float, start_s: float) -> None:
        self.number, self.places = number, places
        self._hang_s, self._start_s = hang_s, start_s
        self._progress: dict[int, RankProgress] = {}
        self._changed_s = dict.fromkeys(range(len(places)), began_s)
        self._first_s: dict[int, float] = {}
        self._done: set[int] = set()
        self._gone: set[int] = set()
        self._causes: list[FailureCause] = []
        self._hang: FailureCause | None = None

    def record_progress(self, event: RankProgress, now_s: float) -> None:
        """Record that a rank has come further."""
        self._progress[event.rank] = event
        self._changed_s[event.rank] = now_s
        if event.first_ago_s is not None:
            self._first_s.setdefault(event.rank, now_s - event.first_ago_s)

    def record_end(self, event: ProcessEnded, now_s: float) -> None:
        """Record that a rank, or the store, is gone."""
        self._gone.add(event.rank)
        if event.is_ours:
            return
        at_s, how = now_s - event.ago_s, _exit_text(event.code)
        if event.rank < 0:
            self._causes.append(FailureCause(-1, "store", f"the store of the rendezvous ended: {how}", at_s))
        elif event.code == 0:
            self._done.add(event.rank)
            self._first_s.setdefault(event.rank, at_s)
        elif event.code == EXIT_CODE:
            self._causes.append(FailureCause(event.rank, "left", "it was asked to end, and its state is saved", at_s))
        elif event.code < 0:
            self._causes.append(FailureCause(event.rank, "signal", f"rank {event.rank} {how}", at_s))
        else:
            self._causes.append(FailureCause(event.rank, "exception", event.text or how, at_s))

    @property
    def has_left(self) -> bool:
        """Whether a rank was asked to end, has saved its state, and has left."""
        return any(c.kind == "left" for c in self._causes)

    def record_lost_node(self, node: int, now_s: float) -> None:
        """Record that a node is gone, with its ranks."""
        self._causes.append(FailureCause(-1, "node", f"node {node} is gone", now_s))

    def has_failed(self, now_s: float) -> bool:
        """Whether something has failed by now whose cause is known; hangs are found here."""
        if self._hang is None and not self._causes:
            late = {rank: now_s - at_s for rank, at_s in self._changed_s.items() if self._is_late(rank, now_s - at_s)}
            if late:
                rank = self._slowest(late)
                after = max(late.values())
                self._hang = FailureCause(rank, "hang", f"no progress of rank {min(late)} for {after:.0f} s", now_s)
        if self.has_left and self.num_left:
            return now_s - min(c.at_s for c in self._causes if c.kind == "left") > _LEAVING_S
        if self._causes and self._hang is None and self.num_left and all(c.is_consequence for c in self._causes):
            return now_s - min(cause.at_s for cause in self._causes) > _ROOT_S
        return bool(self._hang or self._causes)

    @property
    def cause(self) -> FailureCause:
        """The cause of the failure, once all ranks are gone. One that was killed comes before those that could not reach it."""
        order = ("left", "node", "store", "signal", "exception", "hang")
        found = [*self._causes, *([self._hang] if self._hang is not None else [])]
        return min(found, key=lambda cause: (order.index(cause.kind), cause.is_consequence, cause.at_s))

    @property
    def num_left(self) -> int:
        """The number of ranks that have not ended."""
        return len(self.places) - len(self._gone - {-1})

    @property
    def is_finished(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        return len(self._done) == len(self.places)

    @property
    def recovered_s(self) -> float | None:
        """When every rank had done a step; None while one has not."""
        return max(self._first_s.values()) if len(self._first_s) == len(self.places) else None

    @property
    def reached(self) -> int:
        """The newest step that any rank has passed to `keep`, or gone on from."""
        return max((max(m.heartbeat.reached, m.heartbeat.resumed) for m in self._progress.values()), default=-1)

    @property
    def resumed(self) -> int | None:
        """The step that ranks went on from."""
        return max((m.heartbeat.resumed for m in self._progress.values() if m.heartbeat.resumed >= 0), default=None)

    @property
    def progress(self) -> int:
        """The newest step of the job where steps are kept, else the steps since this start."""
        return (
            self.reached
            if self.reached >= 0
            else max((m.heartbeat.num_steps for m in self._progress.values()), default=0)
        )

    def _is_late(self, rank: int, since_s: float) -> bool:
        return rank not in self._done and since_s > (self._hang_s if rank in self._first_s else self._start_s)

    def _slowest(self, late: dict[int, float]) -> int:
        """The rank that has done the least, -1 where there are several."""
        done = {rank: self._progress[rank].heartbeat.num_steps if rank in self._progress else 0 for rank in late}
        slowest = [rank for rank, num in done.items() if num == min(done.values())]
        return slowest[0] if len(slowest) == 1 else -1


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"
