"""This process as one rank of several: its steps, its own work in them, its batches, and its collectives."""

from __future__ import annotations

import os
import socket
import statistics
from collections import Counter, defaultdict, deque
from types import FrameType
from typing import Any, Final, NamedTuple

import msgspec
import torch.distributed as dist

from flatout.check.observe.accelerator import uses_cuda
from flatout.check.observe.calls import RootModule
from flatout.check.observe.collector import (
    BackwardListener,
    BatchListener,
    Collector,
    CommunicationClock,
    EndedStep,
    StepListener,
)
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.ranks.collectives import CollectiveKey, Collectives, Totals
from flatout.check.observe.ranks.replication import Replications
from flatout.check.observe.ranks.stalls import StreamStalls
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.distributed import Collective, Distributed, Place, RankLine, RankSummary
from flatout.core.records.evidence import Evidence, LineTime
from flatout.core.runtime.patches import Patches
from flatout.core.tensors.nests import tensors_in

_MOST_STEPS: Final = 512
_MOST_LINES: Final = 12
_SAMPLED_ON_DEVICE: Final = 10
"""Steps after which DDP takes its stamps on a device as seldom as it does by itself (see replication)."""
_STRAY: Final = 5.0
"""A step this many times the median holds something else: another rank's trials, a checkpoint."""


class WatchedStep(NamedTuple):
    """One lightly observed step of this rank."""

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


class RankWatch(Collector, StepListener, BatchListener, BackwardListener, CommunicationClock):
    """Watches the steps, batches, backwards and collectives of one rank.

    It makes no collective call of its own: how ranks relate is found out when their Evidence is merged.
    """

    def __init__(self, observation: ObservationState, place: Place) -> None:
        self.place = place
        self.backward_site = -1
        self.steps: deque[WatchedStep] = deque(maxlen=_MOST_STEPS)
        self._observation = observation
        self._sites = observation.sites
        self.collectives = Collectives(
            observation.sites,
            phase=observation.phase,
            backward_site=lambda: self.backward_site,
            after_call=observation.resume_recording,
        )
        self.replications = Replications(observation.sites, self.collectives)
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

    def pause(self) -> None:
        """Refuse collectives: trials run on one rank alone, and none may leave this process."""
        self.collectives.is_fenced = True

    def resume(self) -> None:
        """Let collectives pass again: all ranks go on."""
        self.collectives.is_fenced = False

    def remove(self) -> None:
        """Stop counting, and leave DDP as it was found."""
        self._activate(False)
        self.replications.stop_sampling(only_devices=False)

    # -- events ------------- ---------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """A better border of steps was found."""
        self.steps.clear()
        self.collectives.take()
        self.replications.clear()
        self._elements = 0
        self._num_counted = 0

    def on_batch(self, value: Any, *, root: RootModule | None) -> None:
        """Count the elements of what the model is called with; evaluation passes do not count."""
        if root is not None and (root.is_training or self._observation.kind != "training"):
            self._elements += max((t.numel() for t in tensors_in(value)), default=0)

    def on_backward_start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """A backward pass begins, called from here."""
        self.backward_site = self._sites.of_frame(frame)

    def on_backward_end(self) -> None:
        """The backward pass has returned."""
        self.replications.end_backward(self.backward_site)
        self._observation.resume_recording()

    def on_step_end(self, step: EndedStep) -> None:
        """Add up the step; only lightly observed ones are stored."""
        calls = self.collectives.take()
        elements, self._elements = self._elements, 0
        self._num_counted += 1
        if not self._backend and dist.is_available() and dist.is_initialized():
            self._backend = dist.get_backend()
        if self._num_counted >= _SAMPLED_ON_DEVICE and self._observation.is_device:
            self.replications.stop_sampling(only_devices=True)
        self._is_over |= step.mode is Mode.KERNELS  # the profiler slows launches down from then on
        if step.mode is Mode.LIGHT and not self._is_over:
            self.steps.append(WatchedStep(self._num_counted, step.duration_s, elements, calls))

    def _activate(self, on: bool) -> None:
        self.collectives.is_active = self.replications.is_active = self.stalls.is_active = on

    # -- what came of it --------------------------------------------------------------------------------------------------

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `distributed`: what this rank observed; other ranks' share is added by merging."""
        steps = evidence.steps
        distributed = self._record(evidence.lines, steps.phases, steps.step_s)
        return msgspec.structs.replace(evidence, distributed=distributed)

    def _record(self, lines: tuple[LineTime, ...], phases: dict[str, float], step_s: float) -> Distributed:
        self.collectives.settle(wait=uses_cuda())
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
                    host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
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
        """What could not be observed."""
        if self._num_counted and not self._backend:
            return [
                f"rank {self.place.rank} of {self.place.world_size} created no process group while it was watched: "
                "its steps are reported, and no communication was observed"
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
    """One row of the Evidence, in seconds and bytes per step."""
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
    top = Counter(seconds).most_common(_MOST_LINES)
    return tuple(RankLine(source=source, phase=phase, seconds=total) for (source, phase), total in top)
