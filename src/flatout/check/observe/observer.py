"""Drives the observation of a run: light stamps at every step, a few deep steps, a pause for trials of what they suggest."""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

from flatout.check.observe.collector import EndedStep, StepListener
from flatout.check.observe.discovery import collectors_of
from flatout.check.observe.events import Events
from flatout.check.observe.evidence.accounts import usual_root_calls
from flatout.check.observe.lines.sampler import UNWATCHED
from flatout.check.observe.observation import BorderKind, ObservationState
from flatout.check.observe.operators.overhead import LightWork, light_cost_s
from flatout.check.observe.steps.blocks import WATCHED_ROOT_DEVICE_S, WATCHED_ROOT_S, WATCHED_STEP_S, UnwatchedBlocks
from flatout.check.observe.steps.schedule import Mode, Schedule, doing_in
from flatout.check.observe.steps.timeline import PhaseTimeline, has_grown_since_looks
from flatout.core.records.distributed import Place
from flatout.core.runtime.dynamo_frames import dynamo_paused
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.progress import ProgressFile

_WORTH_A_SWAP: Final = 400
"""Calls of modules in a block: each costs 0.3 us more through our function, and putting torch's back and forth takes 100 us
(418 subclasses of nn.Module look their `__call__` up again; torch 2.13, Python 3.11)."""
CLOSE_LOOKS: Final = (Mode.READS, Mode.KERNELS, Mode.DEEP, Mode.MEMORY)

_installed: weakref.WeakSet[LoopObserver] = weakref.WeakSet()
"""Observers that forked children must forget; asking the system for that cannot be taken back, so it is asked once."""


def is_observed() -> bool:
    """Whether an observer watches a loop of this process now."""
    return any(observer.is_installed and not observer.is_complete for observer in _installed)


def _forget_in_children(observer: LoopObserver) -> None:
    if not _installed and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_children)
    _installed.add(observer)


def _leave_children() -> None:
    for observer in _installed:
        observer.leave_child()


class LoopObserver:
    """Watches the thread that created it, from `install` to `remove`. What is observed lies in `observation` and its collectors.

    `pause` is called at the border after the deep steps with the observer inactive: the time for trials. `complete` is called
    when the schedule is done. `place` is passed when this process is one rank of several.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        user_root: str | None,
        pause: Callable[[], None],
        complete: Callable[[], None],
        place: Place | None = None,
        progress: ProgressFile | None = None,
    ) -> None:
        self.schedule = schedule
        self.is_complete = False
        self._progress = progress
        self._events = Events(self)
        self.observation = observation = ObservationState(self._events, user_root=user_root, place=place)
        observation.attach(collectors_of(observation))
        self._events.follow(observation)
        self._step_listeners = observation.listening(StepListener)
        self._pause = pause
        self._on_complete = complete
        self._patches = Patches()
        self._is_end_recorded = False
        """Whether the ends of unwatched steps that are settled are recorded on the device too."""
        self._is_call_on_device = False
        self._calls_in_blocks = 0.0
        """Calls of modules in unwatched steps that went through our function, by their number in watched ones."""
        self.is_installed = False
        self._looks_left: int | None = None
        """Close looks that are made once more; None while it is not known whether any are."""

    # -- life -------------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put all watches in place; what they cost is in `light_fraction`."""
        self.is_installed = True
        _forget_in_children(self)
        observation = self.observation
        observation.calls.install(self._patches)
        observation.optimizing.install(self._patches)
        for collector in observation.collectors:
            collector.install(self._patches)
        for name in ("backward", "grad"):
            self._patches.set(torch.autograd, name, self._events.watching_backward(name, getattr(torch.autograd, name)))
        self._activate(True)
        observation.sampler.start()
        observation.sampler.is_on = False

    def remove(self) -> None:
        """Take every watch away; what was patched is as before."""
        if not self.is_installed:
            return
        self.is_installed = False
        observation = self.observation
        self.cut_block()
        if observation.mode is Mode.LIGHT:
            for collector in observation.collectors:
                collector.end_light()
        self._activate(False)
        observation.sampler.stop()
        if observation.mode is Mode.DEEP:
            observation.deep.leave()
        for collector in observation.collectors:
            collector.remove()
        observation.optimizing.remove()
        self._patches.undo()

    def leave_child(self) -> None:
        """This is a forked child (a loader's worker): what it runs is not the observed loop."""
        self.is_complete = True
        self._activate(False)
        self.observation.sampler.is_on = False
        self.observation.optimizing.unwatched_ends_s = None

    def fail(self, error: Exception) -> None:
        """Our own mistake: say so in the Evidence, stop observing, and let the script go on."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.observation.notes.append(
            f"observing stopped early: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        )
        self._complete()

    def _activate(self, on: bool) -> None:
        self.observation.calls.is_active = self.observation.optimizing.is_active = on

    # -- steps ------------------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """A step function is about to be called (`flatout.check(step, batches)`)."""
        if self.observation.kind != "call":
            self.restart("call")

    def end_call(self) -> None:
        """The step function returned: a step ended."""
        self.border()

    def restart(self, kind: BorderKind) -> None:
        """A better border of steps was found: begin again from the warm-up."""
        observation = self.observation
        if observation.kind == "call":
            return
        with self._events.guarded():
            if observation.mode is Mode.DEEP:
                observation.deep.leave()
            self.cut_block()
            for collector in observation.collectors:
                collector.restart()
            observation.kind = kind
            # What a step function works with is known after its first call.
            observation.is_device = observation.finds_device() if kind != "call" else self._is_call_on_device
            observation.timeline = PhaseTimeline(use_events=observation.is_device)
            observation.mode = Mode.WARM_UP
            self.schedule = self.schedule.after_restart(observation.num_steps)
            observation.num_steps = observation.num_light = 0
            observation.optimizing.restart()
            observation.times.light_s = 0.0
            observation.blocks = UnwatchedBlocks()
            observation.calls.weight = 1
            observation.deep.steps.clear()
            self._looks_left = None
            observation.sampler.clear()
            observation.sampler.is_on = False

    def border(self) -> None:
        """A step ended: file it, and prepare the next."""
        if self.is_complete:
            return
        observation = self.observation
        if observation.blocks.is_open:
            self._note_unwatched_end()
            return
        with self._events.guarded():
            calls = (observation.timeline.root_calls, observation.timeline.evaluation_calls)
            duration = observation.timeline.boundary(observation.mode.value, weight=observation.blocks.weight)
            self._end_step(duration, calls)
            is_first_call = observation.kind == "call" and observation.num_steps == 1
            if is_first_call and not observation.is_device and observation.finds_device():
                observation.kind, self._is_call_on_device = "none", True
                self.restart("call")

    def _end_step(self, duration_s: float, calls: tuple[int, int]) -> None:
        observation, before = self.observation, self.observation.mode
        began = perf_counter()
        duration_s -= observation.compile_s()
        observation.num_steps += 1
        observation.optimizing.end_step()
        self._close_step(before, duration_s, calls)
        mode = observation.mode = self._next_mode()
        if before is Mode.LIGHT and mode is not Mode.LIGHT:
            for collector in observation.collectors:
                collector.end_light()
        self._report_progress(began)
        if before is Mode.DEEP and mode is not Mode.DEEP:
            observation.deep.leave()
            if observation.kind != "inference":
                self._take_pause()
        observation.sampler.is_on = mode is Mode.LIGHT
        if before is Mode.LIGHT and mode is Mode.LIGHT:
            self._begin_block(duration_s, calls[0])
        elif mode is Mode.DEEP:
            observation.deep.open(phase=observation.phase, is_device=observation.is_device)
        elif mode is Mode.DONE:
            self._complete()
        if mode not in (Mode.LIGHT, Mode.DONE):
            for collector in observation.collectors:
                collector.begin(mode)
        if before in CLOSE_LOOKS or mode in CLOSE_LOOKS:
            observation.times.deep_s += perf_counter() - began
            observation.timeline.restart()
            observation.resume_recording()
        if before is not Mode.LIGHT and mode is Mode.LIGHT:  # now that the trials are over
            for collector in observation.collectors:
                collector.begin_light()
            observation.timeline.restart()  # what that took is no part of a step

    def _next_mode(self) -> Mode:
        """The mode of the next step, by the schedule; steps of inference that have grown are looked at closely once more."""
        observation = self.observation
        mode = self.schedule.mode(
            num_steps=observation.num_steps,
            deep_elapsed_s=observation.times.deep_s,
            light_elapsed_s=observation.times.light_s,
            deep_allowed=observation.is_interception_allowed(),
            is_device=observation.is_device,
        )
        is_half_over = observation.times.light_s > self.schedule.observe_s / 2
        if self._looks_left is None and mode is Mode.LIGHT and observation.kind == "inference" and is_half_over:
            has_grown = has_grown_since_looks(observation.timeline.steps)
            self._looks_left = self.schedule.num_deep if has_grown and observation.deep.steps else 0
            if self._looks_left:
                observation.deep.steps.clear()
        if self._looks_left and mode in (Mode.LIGHT, Mode.DONE):
            self._looks_left -= 1
            return Mode.DEEP
        return mode

    def _close_step(self, mode: Mode, duration_s: float, calls: tuple[int, int]) -> None:
        """File the step that ended, and let the collectors end it."""
        observation = self.observation
        if mode is Mode.DEEP:
            observation.times.deep_s += duration_s
            observation.deep.close(*calls)
        elif mode is Mode.LIGHT:
            observation.times.light_s += duration_s
            observation.num_light += 1
            if observation.place is None:  # ranks look at the same steps
                self.schedule = self._for_long_steps(calls[0])
        if mode is not Mode.LIGHT:
            for collector in reversed(observation.collectors):  # what was patched last is put back first
                collector.end(mode)
        self._report_end(mode, duration_s)

    def _for_long_steps(self, num_calls: int) -> Schedule:
        observation, light_s = self.observation, self.observation.times.light_s
        if observation.num_steps > self.schedule.num_before_looks(is_device=observation.is_device):
            return self.schedule
        schedule = self.schedule.for_long_steps(
            num_steps=observation.num_steps, light_elapsed_s=light_s, num_calls=num_calls
        )
        missing = [
            what
            for what, before, after in (
                ("the memory", self.schedule.num_memory, schedule.num_memory),
                ("the kernels of the device", self.schedule.num_kernels * observation.is_device, schedule.num_kernels),
            )
            if before > after == 0
        ]
        if missing:
            observation.notes.append(
                f"a step calls models {num_calls} times; {' and '.join(missing)} of such steps would take minutes to watch, "
                "and are not in this report"
            )
        return schedule

    def _report_end(self, mode: Mode | None, duration_s: float) -> None:
        step = EndedStep(mode, self.observation.timeline.num_ended - 1, duration_s)
        for listener in self._step_listeners:
            listener.on_step_end(step)

    def _begin_block(self, step_s: float, root_calls: int) -> None:
        """Let short steps go by unwatched, so many that the watched one in between costs them little.

        On a device already before the close looks: what is timed honestly there is timed before the profiler has run.
        """
        observation = self.observation
        blocks, is_device = observation.blocks, observation.is_device
        # Ranks are compared step by step, and blocks of theirs would differ.
        is_plain = observation.place is None and (observation.kind != "inference" or self._is_leader_known_by_itself())
        is_plain &= not self._events.is_by_iteration  # the unwatched would not know where an iteration ends
        # An optimizer that steps in an unwatched one would not be seen.
        is_plain &= observation.kind != "manual" or not observation.optimizing.has_optimizers
        room = self.schedule.room_for_block(num_steps=observation.num_steps, is_device=is_device)
        if not is_plain or not room:
            return
        blocks.rhythm.add(observation.num_steps, step_s)
        # Evaluation passes included: where they are long, watching costs little.
        mean_s = observation.times.light_s / max(1, observation.num_sampled)
        watch_s = WATCHED_STEP_S + root_calls * (WATCHED_ROOT_DEVICE_S if is_device else WATCHED_ROOT_S)
        if size := blocks.open(mean_s, num_steps=observation.num_steps, watch_s=watch_s, room=room):
            observation.sampler.spare()
            self._activate(False)
            if observation.kind == "training":
                observation.optimizing.unwatched_ends_s = blocks.ends_s
            elif observation.kind == "inference" and (leader := self._events.leader) is not None:
                observation.calls.counted = leader.module()
            num_calls = observation.calls.num_calls / max(1, observation.num_watched) * size
            if observation.calls.counted is None and num_calls > _WORTH_A_SWAP and not observation.is_compiled:
                observation.calls.leave_alone(True)
            else:
                self._calls_in_blocks += num_calls
            # Once the close looks have begun, the profiler has slowed the launches down.
            self._is_end_recorded = is_device and observation.num_steps <= self.schedule.num_before_looks(
                is_device=True
            )
            observation.optimizing.num_unwatched = size
            observation.optimizing.has_news = False
        # The call that began an unwatched step of inference is on its way; it stands for nothing.
        observation.calls.weight = 0 if blocks.is_open else blocks.weight

    def _is_leader_known_by_itself(self) -> bool:
        """Whether the module whose calls begin the steps of an inference loop is called from one line alone."""
        leader, roots = self._events.leader, self.observation.calls.roots.values()
        module = leader.module() if leader is not None else None
        return module is not None and sum(root.module() is module for root in roots) == 1

    def _note_unwatched_end(self) -> None:
        """A step that goes by unwatched ended, by something else than an optimizer."""
        blocks, optimizing = self.observation.blocks, self.observation.optimizing
        blocks.ends_s.append(perf_counter())
        if optimizing.has_news or len(blocks.ends_s) == blocks.size:
            optimizing.has_news = False
            self.on_unwatched_steps()

    def cut_block(self) -> None:
        """End the unwatched steps before their time, if there are any now, and watch again."""
        observation = self.observation
        if observation.blocks.is_open:
            self._settle_unwatched()
            observation.num_steps += observation.blocks.cut()
            self._end_block()

    def _end_block(self) -> None:
        """Watch again."""
        self.observation.optimizing.unwatched_ends_s = self.observation.calls.counted = None
        self.observation.calls.leave_alone(False)
        self._activate(True)

    def on_unwatched_steps(self) -> None:
        """Steps went by unwatched, and either the block is over or something happened in the last of them."""
        observation, blocks = self.observation, self.observation.blocks
        if self._is_end_recorded:
            observation.timeline.record_unwatched_end()
        self._settle_unwatched()
        if blocks.is_open:
            return
        observation.num_steps += blocks.size
        observation.times.light_s += sum(blocks.durations_s[-blocks.size :])
        observation.calls.weight = blocks.weight
        self._end_block()
        self._report_progress(perf_counter())
        observation.timeline.restart()

    def _settle_unwatched(self) -> None:
        """File the unwatched steps that have ended; what happened since the last time belongs to the last of them."""
        observation, blocks = self.observation, self.observation.blocks
        if blocks.num_gone == blocks.num_settled:
            return
        compile_s = observation.compile_s()
        *quiet_s, last_s = blocks.settle(num_steps=observation.num_steps, compile_s=compile_s)
        observation.timeline.add_unwatched(quiet_s, last_s, compile_s=compile_s)
        self._report_end(None, last_s)
        if observation.sampler.pending:
            is_usual = not blocks.rhythm.stands_out(last_s)
            observation.sampler.settle(UNWATCHED if is_usual else "evaluation")

    def _report_progress(self, now_s: float) -> None:
        """Write how far we are, if the last report is old; between two steps, so that no step is longer for it."""
        observation, mode = self.observation, self.observation.mode
        if self._progress is not None and mode is not Mode.DONE and self._progress.is_due(now_s):
            left_s = max(0.0, self.schedule.observe_s - observation.times.light_s)
            has_looked = observation.num_steps > self.schedule.num_before_looks(is_device=observation.is_device)
            doing = doing_in(mode, has_looked=has_looked)
            self._progress.write(doing, num_steps=observation.num_steps, left_s=left_s)
            observation.timeline.restart()

    def _take_pause(self) -> None:
        began = perf_counter()
        self._activate(False)
        for collector in self.observation.collectors:
            collector.pause()
        try:
            with dynamo_paused():
                self._pause()
        finally:
            for collector in self.observation.collectors:
                collector.resume()
            self._activate(True)
            self.observation.times.deep_s -= perf_counter() - began

    def _complete(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            try:
                self.remove()
            finally:
                self._on_complete()

    def light_fraction(self) -> float:
        """Share of the light steps' time that the light observation took."""
        observation = self.observation
        watched = [s for s in observation.timeline.steps if s.mode == Mode.LIGHT.value]
        unwatched_s = observation.blocks.durations_s
        total_s = sum(s.duration_s for s in watched) + sum(unwatched_s)
        usual = usual_root_calls(watched)
        work = LightWork(
            module_calls=observation.calls.num_calls + self._calls_in_blocks,
            sampler_s=observation.sampler.own_s,
            other_s=observation.times.light_own_s + (self._progress.own_s if self._progress is not None else 0.0),
            ordinary_s=[s.duration_s for s in watched if usual.has(s)],
            unwatched_s=unwatched_s,
        )
        cost_s = light_cost_s(watched, work, is_device=observation.is_device)
        return min(1.0, cost_s / total_s) if total_s else 0.0
