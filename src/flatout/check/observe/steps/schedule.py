"""The schedule of an observation: which steps are watched how, by counts and times alone."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from flatout.core.records.progress import Doing
from flatout.core.records.record import Record

_TRIALS_STEPS: Final = 20
"""Steps' worth of time on top: a few calls each of what would be tried."""
_TRIALS_LEAST_S: Final = 8.0
"""Trials of a data set and of a module take some seconds each."""


class Mode(Enum):
    """How the step that begins now is observed."""

    WARM_UP = "warm-up"
    LIGHT = "light"
    READS = "reads"
    KERNELS = "kernels"
    MEMORY = "memory"
    DEEP = "deep"
    DONE = "done"


_ENOUGH_LIGHT: Final = 0.25
"""Of `observe_s`: light steps before the profiler of a device, where the full number of them would take longer."""
_MEMORY_COST: Final = 8.0
"""How many times as long a step of many calls takes that is looked at for its memory (PPO with 320 updates: 31 and 3.7 s)."""
_MANY_CALLS: Final = 100
_TOO_MANY_CALLS: Final = 1000
"""Launches of so many calls of models fill a trace that took three minutes to read (PPO with 2,300 calls a step on an H200)."""


class Schedule(Record, frozen=True, kw_only=True):
    """Budgets of one observation, in steps and seconds.

    A few light steps come before the deep ones, so that even a short script is observed in all modes; then light steps go on
    until `observe_s` have passed or the script ends. Honest timing uses all light steps.
    """

    num_warm_up: int = 3
    num_light_before: int = 3
    num_light_on_device: int = 20
    """More on a device: the profiler of its kernels slows launches down from then on, so honest timing must come before it."""
    num_reads: int = 1
    num_kernels: int = 4
    """On a device: one to open its profiler, one that counts, one that lends its lines, one for compiled code's operators."""
    num_memory: int = 1
    num_deep: int = 3
    num_settle: int = 0
    """Steps after the deep ones that do not count: with several ranks, those that wait for another rank's trials."""
    deep_budget_s: float = 15.0
    trials_budget_s: float = 15.0
    compile_budget_s: float = 30.0
    """Besides, for trials that compile: 15 to 25 s for the blocks of a transformer on two cores (EPYC, torch 2.13)."""
    observe_s: float = 30.0
    max_light: int = 20_000

    def after_restart(self, num_steps: int) -> Schedule:
        """The schedule once steps are counted anew, after so many by another border: they were a warm-up, too."""
        return msgspec.structs.replace(self, num_warm_up=1) if num_steps > self.num_warm_up else self

    def for_long_steps(self, *, num_steps: int, light_elapsed_s: float, num_calls: int) -> Schedule:
        """The schedule after a light step before the close looks: of steps that are long, fewer are waited for and looked at.

        `num_calls` are calls of models in the step: where they are many, a look at its memory takes several times as long, and
        the device's trace is too large.
        """
        num_light = num_steps - self.num_warm_up
        if num_light < self.num_light_before:
            return self
        has_enough = light_elapsed_s > _ENOUGH_LIGHT * self.observe_s and num_light < self.num_light_on_device
        is_too_long = num_calls >= _MANY_CALLS and _MEMORY_COST * light_elapsed_s > num_light * self.deep_budget_s
        return msgspec.structs.replace(
            self,
            num_light_on_device=num_light if has_enough else self.num_light_on_device,
            num_memory=0 if is_too_long else self.num_memory,
            num_kernels=0 if num_calls >= _TOO_MANY_CALLS else self.num_kernels,
        )

    def trials_limit_s(self, step_s: float) -> float:
        """Seconds for all trials: a short observation is not followed by long trials, and long steps take longer to try."""
        longer_s = min(self.trials_budget_s, _TRIALS_STEPS * step_s)
        return min(self.trials_budget_s, _TRIALS_LEAST_S + self.observe_s / 2) + longer_s

    @property
    def compile_limit_s(self) -> float:
        """Seconds for trials that compile, in the same proportion; none where nothing is tried."""
        return min(self.compile_budget_s, _TRIALS_LEAST_S + 2 * self.observe_s) if self.trials_budget_s else 0.0

    def num_before_looks(self, *, is_device: bool) -> int:
        """Whole steps before the first close look."""
        return self.num_warm_up + (self.num_light_on_device if is_device else self.num_light_before)

    def mode(
        self,
        *,
        num_steps: int,
        deep_elapsed_s: float,
        light_elapsed_s: float,
        deep_allowed: bool,
        is_device: bool = False,
    ) -> Mode:
        """The mode of the next step, after `num_steps` whole steps."""
        stretches = (
            (Mode.WARM_UP, self.num_warm_up),
            (Mode.LIGHT, self.num_before_looks(is_device=is_device) - self.num_warm_up),
            (Mode.READS, self.num_reads),
            (Mode.KERNELS, self.num_kernels if is_device else 0),
            (Mode.MEMORY, self.num_memory if deep_allowed else 0),
            (Mode.DEEP, self.num_deep if deep_allowed else 0),
            (Mode.WARM_UP, self.num_settle),
        )
        position = num_steps
        for mode, num in stretches:
            if 0 <= position < num and (mode is not Mode.DEEP or deep_elapsed_s < self.deep_budget_s):
                return mode
            position -= num
        if light_elapsed_s > self.observe_s or num_steps > self.max_light:
            return Mode.DONE
        return Mode.LIGHT

    def room_for_block(self, *, num_steps: int, is_device: bool) -> int:
        """The most steps that may go by unwatched after `num_steps` whole steps, all of them light, until a close look is due."""
        before = self.num_before_looks(is_device=is_device)
        looks = self.num_reads + self.num_memory + self.num_deep + (self.num_kernels if is_device else 0)
        if num_steps > before + looks:
            return self.max_light
        is_early = is_device and num_steps >= self.num_warm_up + self.num_light_before
        return max(0, before - num_steps - 1) if is_early else 0


def doing_in(mode: Mode, *, has_looked: bool) -> Doing:
    """What a mode of observation is called; `has_looked`: the close looks are over."""
    if mode is Mode.WARM_UP:
        return "warm-up"
    if mode is Mode.LIGHT:
        return "timing again" if has_looked else "timing"
    return "done" if mode is Mode.DONE else "looking closely"
