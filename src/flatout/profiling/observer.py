"""The observation of one run: light stamps at every step, a few deep steps, and trials of what they suggest."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch

from flatout.profiling.calls import ModuleCalls
from flatout.profiling.collector import Collector, InnerWatcher, RootWatcher, StepWatch
from flatout.profiling.collectors.compiling import Compiling
from flatout.profiling.collectors.faults import Faults
from flatout.profiling.collectors.feeding import Feeding
from flatout.profiling.collectors.reads import HostReads, is_on_accelerator
from flatout.profiling.collectors.settings import Settings
from flatout.profiling.collectors.uses import Uses
from flatout.profiling.device.kernels import KernelTimes
from flatout.profiling.device.launches import LaunchLog
from flatout.profiling.events import Events, StepKind
from flatout.profiling.lines.sampler import UNWATCHED, Sampler
from flatout.profiling.operators.deep import DeepLooks
from flatout.profiling.operators.overhead import light_cost_s
from flatout.profiling.operators.recorder import CAN_WATCH_COMPILED
from flatout.profiling.patching import Patches
from flatout.profiling.place import Place
from flatout.profiling.running.processes import Processes
from flatout.profiling.running.progress import ProgressFile, doing_in
from flatout.profiling.sites import Sites
from flatout.profiling.steps.blocks import WATCHED_ROOT_DEVICE_S, WATCHED_ROOT_S, WATCHED_STEP_S, Blocks
from flatout.profiling.steps.optimizing import Optimizing
from flatout.profiling.steps.schedule import Mode, Schedule
from flatout.profiling.steps.timeline import Timeline

if TYPE_CHECKING:
    from flatout.profiling.ranks.watch import RankWatch

_CLOSE_LOOKS: Final = (Mode.READS, Mode.KERNELS, Mode.DEEP, Mode.MEMORY)


class Observer:
    """Watches the thread that made it, from `install` to `remove`. `Events` hears what happens; what is kept lies in the parts.

    `pause` is called at the border after the deep steps with the observer inactive: the time for trials. `complete` is called
    when the schedule is done. `place` is given when this process is one rank of several.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        user_root: str | None,
        pause: Callable[[Observer], None],
        complete: Callable[[], None],
        place: Place | None = None,
    ) -> None:
        self.schedule = schedule
        self.sites = Sites(user_root=user_root)
        self._events = events = Events(self)
        self.settings = Settings(self.sites)
        self.calls = ModuleCalls(self.sites, events)
        self.feeding = Feeding(self.sites, events)
        self.optimizing = Optimizing(self.sites, events)
        self.processes = Processes()
        self.thread_id = get_ident()
        self.kind: StepKind = "none"
        self.is_device = False
        self.timeline = Timeline(use_events=False)
        self.sampler = Sampler(self.sites, phase=self._phase_of_sample)
        self.reads = HostReads(self.sites, lambda: self.timeline.phase)
        self.kernels = KernelTimes(self._launch_log)
        self.mode = Mode.WARM_UP
        self.seen = 0
        self.deep = DeepLooks(self.sites, self.calls, self.optimizing, thread_id=self.thread_id)
        self.blocks = Blocks()
        self.uses = Uses(self.sites, phase=lambda: self.timeline.phase, step=lambda: self._step_of_event()[0])
        self.compiling = Compiling(
            self.sites,
            clock=lambda: self.timeline,
            step=self._step_of_event,
            on_use=self.uses.spare_compiled_code,
        )
        self.ranks = None if place is None else self._watch_ranks(place)
        self.collectors: tuple[Collector, ...] = (self.compiling, self.uses)
        if self.ranks is not None:
            self.collectors += (self.ranks,)
        self.faults = Faults()
        self.deep.inspectors.append(self.faults.inspect)
        self.watch: StepWatch | None = None
        self.root_watchers: tuple[RootWatcher, ...] = ()
        self.inner_watcher: InnerWatcher | None = None
        self.light_s = 0.0
        self.deep_s = 0.0
        self.pause_s = 0.0
        self.trials_s = 0.0
        self.notes: list[str] = []
        self.progress: ProgressFile | None = None
        self.is_complete = False
        self._pause = pause
        self._on_complete = complete
        self._patches = Patches()
        self._num_light = 0
        self._marks_unwatched = False
        """Whether the ends of unwatched steps that are settled are marked on the device too."""
        self._is_call_on_device = False
        self._is_installed = False

    def _watch_ranks(self, place: Place) -> RankWatch:
        from flatout.profiling.ranks.watch import RankWatch  # there are builds of torch without torch.distributed

        watch = RankWatch(self.sites, place, phase=lambda: self.timeline.phase)
        watch.collectives.after_call = self.resume_recording
        return watch

    def resume_recording(self) -> None:
        """The time since the last recorded operator was not the user's."""
        if self.deep.recorder is not None:
            self.deep.recorder.resume()

    # -- life -------------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put all watches in place; what they cost is told by `light_fraction`."""
        self._is_installed = True
        self.settings.install(self._patches)
        self.calls.install(self._patches)
        self.feeding.install(self._patches)
        self.optimizing.install(self._patches)
        self.processes.install(self._patches)
        for collector in self.collectors:
            collector.install(self._patches)
        for name in ("backward", "grad"):
            self._patches.set(torch.autograd, name, self._events.watching_backward(name, getattr(torch.autograd, name)))
        self._activate(True)
        self.sampler.start()
        self.sampler.is_on = False

    def remove(self) -> None:
        """Take every watch away; what was patched is as before."""
        if not self._is_installed:
            return
        self._is_installed = False
        if self.blocks.is_open:
            self._settle_unwatched()
            self.seen += self.blocks.cut()
            self.optimizing.unwatched_ends_s = None
        if self.mode is Mode.LIGHT:
            self.faults.end(seen=self.seen)
        self._activate(False)
        self.sampler.stop()
        if self.mode is Mode.READS:
            self.reads.end()
        if self.mode is Mode.KERNELS:
            self.kernels.abort()
        if self.mode is Mode.DEEP:
            self.deep.leave()
        for collector in self.collectors:
            collector.remove()
        self.optimizing.remove()
        self._patches.undo()

    def fail(self, error: Exception) -> None:
        """Our own mistake: say so in the Evidence, stop observing, and let the script go on."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.notes.append(
            f"observing stopped early: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        )
        self._complete()

    def _activate(self, on: bool) -> None:
        self.calls.is_active = self.feeding.is_active = self.optimizing.is_active = on

    # -- steps ------------------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """A step function is about to be called (`flatout.check(step, batches)`)."""
        if self.kind != "call":
            self.restart("call")

    def end_call(self) -> None:
        """The step function returned."""
        self.border()

    def restart(self, kind: StepKind) -> None:
        """A better border of steps was found: begin again from the warm-up."""
        if self.kind == "call":
            return
        try:
            if self.mode is Mode.DEEP:
                self.deep.leave()
            elif self.mode is Mode.READS:
                self.reads.end()
            self.kernels.abort()
            if self.mode not in (Mode.LIGHT, Mode.DONE):
                for collector in self.collectors:
                    collector.end(self.mode)
            self.kind = kind
            # What a step function works with is seen in its first call.
            self.is_device = self._is_on_device() if kind != "call" else self._is_call_on_device
            self.timeline = Timeline(use_events=self.is_device)
            self.mode = Mode.WARM_UP
            self.seen = 0
            self.light_s = 0.0
            self._num_light = 0
            self.blocks = Blocks()
            self.calls.weight = self.feeding.weight = 1
            self.deep.steps.clear()
            self.reads.seen.clear()
            self.reads.uploads.clear()
            self.reads.num_steps = 0
            self.uses.clear()
            self.faults.clear()
            self.sampler.clear()
            self.sampler.is_on = False
            if self.ranks is not None:
                self.ranks.restart()
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self.fail(e)

    def _is_on_device(self) -> bool:
        return is_on_accelerator((*self.calls.tensors(), *self.optimizing.tensors()))

    def border(self) -> None:
        """A step ended: file it, and prepare the next."""
        if self.is_complete:
            return
        try:
            calls = self.timeline.root_calls
            duration = self.timeline.boundary(self.mode.value, weight=self.blocks.weight)
            self._end_step(duration, calls)
            if self.kind == "call" and self.seen == 1 and not self.is_device and self._is_on_device():
                self.kind, self._is_call_on_device = "none", True
                self.restart("call")
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self.fail(e)

    def _end_step(self, duration_s: float, root_calls: int) -> None:
        before = self.mode
        began = perf_counter()
        duration_s -= self.compiling.taken_s()
        if rare_s := self.uses.taken_s():
            self.uses.by_step[self.timeline.num_ended - 1] = rare_s
        self.seen += 1
        if before is Mode.DEEP:
            self.deep_s += duration_s
            self.deep.close(duration_s, root_calls)
        elif before is Mode.LIGHT:
            self.light_s += duration_s
            self._num_light += 1
        elif before is Mode.READS:
            self.reads.end()
            self.reads.num_steps += 1
        elif before is Mode.KERNELS:
            self.kernels.end(self.timeline.last_marks)
        if before is not Mode.LIGHT:
            for collector in reversed(self.collectors):  # what was patched last is put back first
                collector.end(before)
        elif self.watch is not None:
            self.watch.on_light()
        if self.ranks is not None:
            self.ranks.end_step(before, self.seen, duration_s, is_device=self.is_device)
        self.mode = self.schedule.mode(
            seen=self.seen,
            deep_elapsed_s=self.deep_s,
            light_elapsed_s=self.light_s,
            deep_allowed=self._is_deep_allowed(),
            is_device=self.is_device,
        )
        if before is Mode.LIGHT and self.mode is not Mode.LIGHT:
            self.faults.end(seen=self.seen)
        self._tell_progress(began)
        if before is Mode.DEEP and self.mode is not Mode.DEEP:
            self.deep.leave()
            if self.kind != "inference":
                self._take_pause()
        self.sampler.is_on = self.mode is Mode.LIGHT
        if before is Mode.LIGHT and self.mode is Mode.LIGHT:
            self._begin_block(duration_s, root_calls)
        elif self.mode is Mode.READS:
            self.reads.begin()
        elif self.mode is Mode.KERNELS:
            self.kernels.begin()
        elif self.mode is Mode.DEEP:
            self.faults.begin_deep()
            self.deep.open(phase=lambda: self.timeline.phase, is_device=self.is_device)
        elif self.mode is Mode.DONE:
            self._complete()
        if self.mode not in (Mode.LIGHT, Mode.DONE):
            for collector in self.collectors:
                collector.begin(self.mode)
        if before in _CLOSE_LOOKS or self.mode in _CLOSE_LOOKS:
            self.deep_s += perf_counter() - began
            self.timeline.restart()
            if self.deep.recorder is not None:
                self.deep.recorder.resume()
        if before is not Mode.LIGHT and self.mode is Mode.LIGHT:  # now that the trials are over
            self.faults.begin(seen=self.seen)

    def _begin_block(self, step_s: float, root_calls: int) -> None:
        """Let short steps go by unwatched, so many that the watched one in between costs them little.

        On a device already before the close looks: what is timed honestly there is timed before the profiler has run.
        """
        is_plain = self.kind == "training" and len(self.optimizing.watched) == 1
        is_plain &= self.ranks is None  # ranks are compared step by step, and blocks of theirs would differ
        room = self.schedule.room_for_block(seen=self.seen, is_device=self.is_device)
        if not is_plain or not room:
            return
        self.blocks.rhythm.add(self.seen, step_s)
        # Evaluation passes included: where they are long, watching costs little.
        mean_s = self.light_s / max(1, self.num_sampled)
        watch_s = WATCHED_STEP_S + root_calls * (WATCHED_ROOT_DEVICE_S if self.is_device else WATCHED_ROOT_S)
        if size := self.blocks.open(mean_s, seen=self.seen, watch_s=watch_s, room=room):
            self.sampler.spare()
            self._activate(False)
            self.optimizing.unwatched_ends_s = self.blocks.ends_s
            is_honest = self.is_device and not self.reads.num_steps  # later the profiler has slowed the launches down
            self._marks_unwatched = is_honest
            self.optimizing.num_unwatched = size
            self.optimizing.has_news = False
        self.calls.weight = self.feeding.weight = self.blocks.weight

    def on_unwatched_steps(self) -> None:
        """Steps went by unwatched, and either the block is over or something happened in the last of them."""
        if self._marks_unwatched:
            self.timeline.mark_unwatched()
        self._settle_unwatched()
        if self.blocks.is_open:
            return
        self.seen += self.blocks.size
        self.light_s += sum(self.blocks.durations_s[-self.blocks.size :])
        self.optimizing.unwatched_ends_s = None
        self.calls.weight = self.feeding.weight = self.blocks.weight
        self._activate(True)
        self._tell_progress(perf_counter())
        self.timeline.restart()

    def _settle_unwatched(self) -> None:
        """File the unwatched steps that have ended; what happened since the last time belongs to the last of them."""
        if self.blocks.num_gone == self.blocks.num_settled:
            return
        compile_s = self.compiling.taken_s()
        *quiet_s, last_s = self.blocks.settle(seen=self.seen, compile_s=compile_s)
        self.timeline.add_unwatched(quiet_s, last_s, compile_s=compile_s)
        if rare_s := self.uses.taken_s():
            self.uses.by_step[self.timeline.num_ended - 1] = rare_s
        if self.sampler.pending:
            is_usual = not self.blocks.rhythm.stands_out(last_s)
            self.sampler.settle(UNWATCHED if is_usual else "evaluation")

    def _tell_progress(self, now_s: float) -> None:
        """Say how far we are, if the last word is old; between two steps, so that no step is longer for it."""
        if self.progress is not None and self.mode is not Mode.DONE and self.progress.is_due(now_s):
            left_s = max(0.0, self.schedule.observe_s - self.light_s)
            doing = doing_in(self.mode, has_looked=self.reads.num_steps > 0)
            self.progress.tell(doing, num_steps=self.seen, left_s=left_s)
            self.timeline.restart()

    def _take_pause(self) -> None:
        began = perf_counter()
        self._activate(False)
        self.compiling.pause()
        self.uses.is_on = False
        self.feeding.is_paused = True
        try:
            self._pause(self)
        finally:
            self.feeding.is_paused = False
            self.uses.is_on = not self.uses.failure
            self.compiling.resume()
            self._activate(True)
            self.pause_s += perf_counter() - began
            self.deep_s -= perf_counter() - began

    def _complete(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            self.remove()
            self._on_complete()

    def _launch_log(self) -> LaunchLog | None:
        """The log that lends kernels their lines; None for compiled code, which interception would switch off."""
        if not self._is_deep_allowed():
            return None
        return LaunchLog(
            self.sites, phase=lambda: self.timeline.phase, module=self.calls.module_path, thread_id=self.thread_id
        )

    def _is_deep_allowed(self) -> bool:
        if not self.compiling.is_used or CAN_WATCH_COMPILED:
            return True
        note = (
            "the script uses torch.compile: no operators were recorded, since with this version of torch recording would switch "
            "the compiled code off"
        )
        if note not in self.notes:
            self.notes.append(note)
        return False

    def _phase_of_sample(self) -> str:
        """The phase a sample taken now is filed under."""
        if not self.blocks.is_open:
            return self.timeline.phase
        self.optimizing.has_news = True
        return UNWATCHED

    def _step_of_event(self) -> tuple[int, bool]:
        """The number of the step that something happens in now, and whether that step is timed."""
        self.optimizing.has_news = True
        return self.seen + self.blocks.num_gone, self.mode is Mode.LIGHT

    @property
    def num_sampled(self) -> int:
        """Steps during which lines were sampled."""
        return self._num_light + len(self.blocks.durations_s)

    def light_fraction(self) -> float:
        """Share of the light steps' time that the light observation took, from unit prices and the sampler's own clock."""
        steps = [s for s in self.timeline.steps if s.mode == Mode.LIGHT.value]
        total_s = sum(s.duration_s for s in steps) + sum(self.blocks.durations_s)
        own_s = self.sampler.own_s + (self.progress.own_s if self.progress is not None else 0.0)
        return light_cost_s(steps, own_s, is_device=self.is_device) / total_s if total_s else 0.0
