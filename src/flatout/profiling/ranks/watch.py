"""This process as one rank of several: its steps, its own work in them, its batches, and its collectives."""

from __future__ import annotations

import socket
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from flatout.profiling.calls import iter_tensors
from flatout.profiling.patching import Patches
from flatout.profiling.place import Place
from flatout.profiling.ranks.collectives import CollectiveKey, Collectives, Totals
from flatout.profiling.ranks.replication import Replications
from flatout.profiling.ranks.stalls import StreamStalls
from flatout.profiling.sites import Sites
from flatout.profiling.steps.schedule import Mode
from flatout.records.distributed import Collective, Distributed, RankLine, RankSummary
from flatout.records.evidence import LineTime

_STEPS_KEPT: Final = 512
_LINES_KEPT: Final = 12
_SAMPLED_ON_DEVICE: Final = 10
"""Steps after which DDP takes its stamps on a device as seldom as it does by itself (see replication)."""
_STRAY: Final = 5.0
"""A step this many times the median holds something else: another rank's trials, a checkpoint."""


class WatchedStep(NamedTuple):
    """One lightly observed step."""

    number: int
    duration_s: float
    elements: int
    calls: dict[CollectiveKey, Totals]

    @property
    def is_known(self) -> bool:
        """Whether the exposed time of all its collectives is known."""
        return not any(t.num_open or t.is_unknown for t in self.calls.values())

    @property
    def exposed_s(self) -> float:
        return sum(t.exposed_s for t in self.calls.values())


class RankWatch:
    """A Collector that the observer also tells of every step, batch and backward.

    It makes no collective call of its own: what ranks are to one another is found out when their Evidence is merged.
    """

    def __init__(self, sites: Sites, place: Place, *, phase: Callable[[], str]) -> None:
        self.place = place
        self.backward_site = -1
        self.steps: deque[WatchedStep] = deque(maxlen=_STEPS_KEPT)
        self._sites = sites
        self.collectives = Collectives(sites, phase=phase, backward_site=lambda: self.backward_site)
        self.replications = Replications(sites, self.collectives)
        self.stalls = StreamStalls(self.collectives)
        self._backend = ""
        self._elements = 0
        self._num_counted = 0
        self._is_over = False

    # -- as a collector ---------------------------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Wrap the collectives and the reducers."""
        self.collectives.install(patches)
        self.replications.install(patches)
        self.stalls.install(patches)
        self._activate(True)

    def begin(self, mode: Mode) -> None:
        """Nothing to prepare: every watched step is watched alike."""

    def end(self, mode: Mode) -> None:
        """Nothing to end: see `end_step`."""

    def remove(self) -> None:
        """Stop counting, and leave DDP as it was found."""
        self._activate(False)
        self.replications.stop_sampling(only_devices=False)

    # -- told by the observer ---------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A better border of steps was found."""
        self.steps.clear()
        self.collectives.take()
        self.replications.clear()
        self._elements = 0
        self._num_counted = 0

    def add_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these."""
        self._elements += max((t.numel() for t in iter_tensors((args, kwargs))), default=0)

    def begin_backward(self, frame: FrameType) -> None:
        """A backward pass begins, called from here."""
        self.backward_site = self._sites.of_frame(frame)

    def end_backward(self) -> None:
        """It returned."""
        self.replications.end_backward(self.backward_site)

    def end_step(self, mode: Mode, number: int, duration_s: float, *, is_device: bool) -> None:
        """The step with this number ended; only lightly observed ones are kept."""
        calls = self.collectives.take()
        elements, self._elements = self._elements, 0
        self._num_counted += 1
        if not self._backend and dist.is_available() and dist.is_initialized():
            self._backend = dist.get_backend()
        if is_device and number >= _SAMPLED_ON_DEVICE:
            self.replications.stop_sampling(only_devices=True)
        self._is_over |= mode is Mode.KERNELS  # the profiler slows launches down from then on
        if mode is Mode.LIGHT and not self._is_over:
            self.steps.append(WatchedStep(number, duration_s, elements, calls))

    def fence(self, on: bool) -> None:
        """Between borders trials run, on one rank alone: no collective may leave this process."""
        self.collectives.is_fenced = on

    def _activate(self, on: bool) -> None:
        self.collectives.is_active = self.replications.is_active = self.stalls.is_active = on

    # -- what came of it --------------------------------------------------------------------------------------------------

    def record(self, lines: tuple[LineTime, ...], phases: dict[str, float], step_s: float) -> Distributed:
        """What this rank saw; other ranks' share is added by merging."""
        self.collectives.settle(wait=torch.cuda.is_available() and torch.cuda.is_initialized())
        steps = self._usable()
        keys = list(dict.fromkeys(key for step in steps for key in step.calls))
        work = [max(0.0, s.duration_s - s.exposed_s) for s in steps]
        return Distributed(
            backend=self._backend,
            rank=self.place.rank,
            world_size=self.place.world_size,
            ranks=(
                RankSummary(
                    rank=self.place.rank,
                    host=socket.gethostname(),
                    step_s=step_s,
                    work_s=statistics.median(work) if work else step_s,
                    phases=phases,
                    step_numbers=tuple(s.number for s in steps),
                    work_by_step=tuple(round(w, 9) for w in work),
                    batch_elements=tuple(s.elements for s in steps),
                    lines=_hottest(lines),
                    num_steps=self._num_counted,
                ),
            ),
            collectives=tuple(_collective(key, steps) for key in keys),
            replications=self.replications.records(self._num_counted),
        )

    def exposed_s(self, phase: str | None = None) -> float:
        """Median exposed communication of a step: in one phase, or in all."""
        rows = [
            sum(t.exposed_s for key, t in s.calls.items() if phase is None or key.phase == phase)
            for s in self._usable()
        ]
        return statistics.median(rows) if rows else 0.0

    def notes(self) -> list[str]:
        """What could not be told."""
        if self._num_counted and not self._backend:
            return [
                f"rank {self.place.rank} of {self.place.world_size} made no process group while it was watched: "
                "its steps are reported, and no communication was seen"
            ]
        unknown = sum(not s.is_known for s in self.steps)
        if unknown and unknown == len(self.steps):
            return ["DDP's own time stamps were missing: the exposed time of its gradient synchronisation is unknown"]
        return []

    def _usable(self) -> list[WatchedStep]:
        """Steps whose communication is known, less those that hold something else; without the last, which end the watch.

        Ranks end their watch some steps apart, and what the first one does then the others wait for.
        """
        steps = list(self.steps)
        steps = steps[:-2] if len(steps) > 8 else steps
        known = [s for s in steps if s.is_known]
        if not known:
            return []
        usual_s = statistics.median(s.duration_s for s in known)
        return [s for s in known if s.duration_s <= _STRAY * usual_s]


def _collective(key: CollectiveKey, steps: list[WatchedStep]) -> Collective:
    """One row, per step."""
    rows = [s.calls[key] for s in steps if key in s.calls]
    small_s = [t for row in rows for t in row.small_s]
    n = len(steps)
    return Collective(
        op=key.op,
        source=key.site,
        phase=key.phase,
        backend=key.backend,
        group_size=key.group_size,
        num=sum(r.num for r in rows) / n,
        bytes=round(sum(r.bytes for r in rows) / n),
        seconds=sum(r.seconds for r in rows) / n,
        exposed_s=sum(r.exposed_s for r in rows) / n,
        caller=key.caller,
        small_call_s=statistics.median(small_s) if small_s else 0.0,
        exposed_by_step=tuple(round(s.calls[key].exposed_s, 9) if key in s.calls else 0.0 for s in steps),
    )


def _hottest(lines: tuple[LineTime, ...]) -> tuple[RankLine, ...]:
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for line in lines:
        if line.source >= 0:
            seconds[line.source, line.phase] += line.seconds
    top = Counter(seconds).most_common(_LINES_KEPT)
    return tuple(RankLine(source=source, phase=phase, seconds=total) for (source, phase), total in top)
