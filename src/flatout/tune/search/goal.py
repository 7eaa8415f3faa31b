"""What a search is for: the least time or the least memory of a step, within which limits."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from flatout.core.records.lever import Lever, Parameters
from flatout.core.records.verdict import Guarantee, Speed
from flatout.core.units import duration

_CHEAP: Final = 1.5
"""Efforts up to this are tried as one where time is short: nothing of them compiles."""
_CHEAP_ON_DEVICE: Final = 2.0
"""The same on a device, where bfloat16 and TF32 are among them: they are what most of its matrix units are there for."""
_HARDLY_SLOWER: Final = 0.98
"""A run that takes this share of a planned one's time is no slower for its user: two runs of one script differ by more."""
_ON_DEVICE: Final = 0.5
"""On a device starting and recording take most of a comparison: of a compiled GPT-2 small 53 s, and as it is 20 to 30 s."""

Objective = Literal["time", "memory"]


class SearchGoal(NamedTuple):
    """What a plan is for: the least time or the least memory; and how many bytes a step may hold at most (0: no limit).

    `step_s` and `peak_bytes` are of the untouched script; promises are weighed against them.
    """

    step_s: float
    peak_bytes: int = 0
    objective: Objective = "time"
    most_bytes: int = 0
    allow: Guarantee = "bounded"
    """The weakest guarantee of a lever."""
    num_steps: int = 0
    """Steps of the runs that it is for: what gains no whole run of them is not taken; 0: as many as the script has, if known."""

    is_on_device: bool = False

    def effort_of(self, lever: Lever, parameters: Parameters) -> float:
        """How many times as long a comparison of this lever takes as others."""
        effort = lever.effort_with(parameters)
        return 1 + _ON_DEVICE * (effort - 1) if self.is_on_device else effort

    @property
    def cheap(self) -> float:
        """The effort up to which levers are tried as one."""
        return _CHEAP_ON_DEVICE if self.is_on_device else _CHEAP

    def too_late(self, speed: Speed, start_s: float = 0.0) -> str:
        """A sentence on a gain that comes after the end of the run; '' where it comes in time, or the length is not known.

        `start_s` are the seconds that the run begins later besides what the race saw.
        """
        num_steps, pays_from = self.num_steps or speed.num_run, speed.pays_from(start_s)
        is_for_time = self.objective == "time" and not self.must_shrink
        if not is_for_time or not num_steps or pays_from is None or pays_from <= num_steps:
            return ""
        later = f"{speed.ratio:.2f}x faster a step, but the first steps end {duration(speed.later_s + start_s)} later"
        longer = "" if self.num_steps else " (--run-steps N for longer runs)"
        return f"{later}: it pays from step {pays_from:,} on, and the run has {num_steps:,}{longer}"

    def too_late_at_worst(self, speed: Speed, start_s: float = 0.0) -> str:
        """`too_late`, and the same for a gain at the low end of its interval where that would make the run noticeably slower."""
        worst, num_steps = speed.at_least, self.num_steps or speed.num_run
        late = self.too_late(speed, start_s)
        if late or (num_steps and speed.num_first and worst.gain_of_run(num_steps, start_s) >= _HARDLY_SLOWER):
            return late
        return self.too_late(worst, start_s)

    @property
    def must_shrink(self) -> bool:
        """Whether the untouched script is over the limit."""
        return 0 < self.most_bytes < self.peak_bytes
