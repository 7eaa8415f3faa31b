"""One life of a job: from the fork of its ranks until all have ended, or one has failed."""

from __future__ import annotations

import re
import signal
from typing import Final, NamedTuple

from flatout.surviving.account import Kind
from flatout.surviving.messages import Ended, Marked
from flatout.surviving.policy import Place

_LOST: Final = re.compile(r"Connection (closed|reset|refused)|connectFullMesh|Broken pipe|DistNetworkError|NCCL error")
"""What ranks raise because another one is gone (gloo, the store, NCCL)."""
_ROOT_S: Final = 1.0
"""How long such an error waits for the one that caused it: a rank that raises still closes its groups before it can tell."""


class Cause(NamedTuple):
    """What failed first. `rank` is -1 where no single rank did."""

    rank: int
    kind: Kind
    text: str
    at_s: float

    @property
    def is_consequence(self) -> bool:
        """Whether a rank says only that it cannot reach another."""
        return self.kind == "exception" and _LOST.search(self.text) is not None


class Epoch:
    """What is known of the ranks, by number; times are those of the supervisor's clock."""

    def __init__(self, number: int, places: list[Place], *, began_s: float, hang_s: float, start_s: float) -> None:
        self.number, self.places = number, places
        self._hang_s, self._start_s = hang_s, start_s
        self._marks: dict[int, Marked] = {}
        self._changed_s = dict.fromkeys(range(len(places)), began_s)
        self._first_s: dict[int, float] = {}
        self._done: set[int] = set()
        self._gone: set[int] = set()
        self._causes: list[Cause] = []
        self._found: Cause | None = None

    def mark(self, event: Marked, now_s: float) -> None:
        """A rank has come further."""
        self._marks[event.rank] = event
        self._changed_s[event.rank] = now_s
        if event.first_ago_s is not None:
            self._first_s.setdefault(event.rank, now_s - event.first_ago_s)

    def end(self, event: Ended, now_s: float) -> None:
        """A rank, or the store, is gone."""
        self._gone.add(event.rank)
        if event.is_ours:
            return
        at_s = now_s - event.ago_s
        if event.rank < 0:
            self._causes.append(Cause(-1, "store", f"the store of the rendezvous ended: {_how(event.code)}", at_s))
        elif event.code == 0:
            self._done.add(event.rank)
            self._first_s.setdefault(event.rank, at_s)
        elif event.code < 0:
            self._causes.append(Cause(event.rank, "signal", f"rank {event.rank} {_how(event.code)}", at_s))
        else:
            self._causes.append(Cause(event.rank, "exception", event.text or _how(event.code), at_s))

    def lose(self, node: int, now_s: float) -> None:
        """A node is gone, with its ranks."""
        self._causes.append(Cause(-1, "node", f"node {node} is gone", now_s))

    def look(self, now_s: float) -> bool:
        """Whether something has failed by now, and what it was is known; hangs are found here."""
        if self._found is None and not self._causes:
            late = {rank: now_s - at_s for rank, at_s in self._changed_s.items() if self._is_late(rank, now_s - at_s)}
            if late:
                rank = self._slowest(late)
                after = max(late.values())
                self._found = Cause(rank, "hang", f"no progress of rank {min(late)} for {after:.0f} s", now_s)
        if (
            self._found is None
            and self._causes
            and all(cause.is_consequence for cause in self._causes)
            and self.num_left
        ):
            return now_s - min(cause.at_s for cause in self._causes) > _ROOT_S
        return bool(self._found or self._causes)

    @property
    def cause(self) -> Cause:
        """Of the failure, once all of the epoch is gone. Who was killed comes before those who then could not reach it."""
        order = ("node", "store", "signal", "exception", "hang")
        found = [*self._causes, *([self._found] if self._found is not None else [])]
        return min(found, key=lambda cause: (order.index(cause.kind), cause.is_consequence, cause.at_s))

    @property
    def num_left(self) -> int:
        """Ranks that have not ended."""
        return len(self.places) - len(self._gone - {-1})

    @property
    def is_finished(self) -> bool:
        """Every rank has ended well."""
        return len(self._done) == len(self.places)

    @property
    def recovered_s(self) -> float | None:
        """When every rank had done a step; None while one has not."""
        return max(self._first_s.values()) if len(self._first_s) == len(self.places) else None

    @property
    def reached(self) -> int:
        """The newest step that any rank has given to `keep`, or gone on from."""
        return max((max(m.reached, m.resumed) for m in self._marks.values()), default=-1)

    @property
    def resumed(self) -> int | None:
        """The step that ranks went on from."""
        return max((m.resumed for m in self._marks.values() if m.resumed >= 0), default=None)

    @property
    def progress(self) -> int:
        """Steps of the job where they are kept, else of this epoch."""
        return self.reached if self.reached >= 0 else max((m.num_steps for m in self._marks.values()), default=0)

    def _is_late(self, rank: int, since_s: float) -> bool:
        return rank not in self._done and since_s > (self._hang_s if rank in self._first_s else self._start_s)

    def _slowest(self, late: dict[int, float]) -> int:
        """The one that has done the least, where there is one."""
        done = {rank: self._marks[rank].num_steps if rank in self._marks else 0 for rank in late}
        slowest = [rank for rank, num in done.items() if num == min(done.values())]
        return slowest[0] if len(slowest) == 1 else -1


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"
