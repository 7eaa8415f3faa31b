"""Two standing scripts take stretches of the same steps in turn: how much faster is one of them?"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from statistics import median
from typing import Final, NamedTuple

from flatout.core.records.verdict import Footprint, Speed
from flatout.machine.measure.stats import median_estimate, ratio_estimate
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, SideProcess, is_out_of_memory

_STRETCH_S: Final = 0.15
"""Of the slower side: long beside a turn, short beside what changes on a machine."""
_FEWEST_PAIRS: Final = 7
"""Below six, no interval of a median reaches 95 %; of six or seven it is the whole range."""
_PAIRS_WITH_AN_OUTLIER: Final = 9
"""With so many pairs one that fell out of line, as where workers start over, leaves the interval alone. Going on from the fewest
where all but one agree errs in 1.6 % + 3.9 % of cases at most."""
_MOST_PAIRS: Final = 60
_WARM_UP_PAIRS: Final = 2
_MOST_STEPS: Final = 2000
_LONGEST_S: Final = 1.5
"""Of the slower side, where a stretch is to have whole cycles of a loader's workers: those of longer steps come and go in it."""
_CYCLES: Final = 3
_LONGEST_CYCLES_S: Final = 3.0
"""A stretch has three cycles of a loader's workers where they take no longer (a ResNet-50 with four workers on an H200: ratios of
stretches of one cycle of 0.7 s went from 0.6 to 1.4)."""
_LONGEST_RACE: Final = 10.0
"""How many times its budget a race may take for the fewest pairs: of whole cycles, or of long steps."""
_LONGEST_RACE_WITH_ROLLOUTS: Final = 20.0
"""Or of updates with their rollouts: those of PPO take 5 s and more."""
_LONGEST_LEARNING: Final = 3.0
"""How many times its budget a race may wait for the second rollout: some scripts collect what they learn from once."""
_LEAK_FLOOR_BYTES: Final = 32 << 20
"""Allocators round and keep; what grows by less in a race is no leak that could be told."""
_LEAK_FLOOR_SHARE: Final = 0.1
"""Or of the peak at the start: the heap goes on growing by some per cent while batches of new sizes come in."""
_LEAKING_SHARE: Final = 0.75
"""Of the stretches in which a leak shows."""


class PairedStretch(NamedTuple):
    """Seconds of the same steps on both sides."""

    before_s: float
    after_s: float
    num_steps: int


class Race:
    """Measures until the interval is narrow enough, the time is up, or a script has no steps left."""

    def __init__(
        self,
        *,
        budget_s: float,
        timeout_s: float,
        precision: float = 0.01,
        num_steps: int = 0,
        warm_up_steps: int = 0,
        cycle: int = 0,
        is_lean: bool = False,
    ) -> None:
        """`budget_s` is for one run of two processes; `precision` the relative half width of the interval that is enough.

        `num_steps` is how many steps the scripts have, if that is known: stretches are so short that enough of them fit in.
        `warm_up_steps` go by on the changed side before anything is timed: they fill its caches. A stretch has a multiple of
        `cycle` steps: in reinforcement learning, those between two rollouts. With 0 the sides tell it from the second rollout
        on; nothing counts before that, or before it would take too long. Where `is_lean`, a side that stands caches no memory of
        the device, which the other needs.
        """
        self.stretches: list[PairedStretch] = []
        self.has_ended = False
        """Whether the scripts of the last run ended before there were enough pairs."""
        self.num_starts = 0
        self._sizes: list[tuple[SideAnswer, SideAnswer]] = []
        self._leak = ""
        self._first: tuple[SideAnswer, SideAnswer] | None = None
        self._budget_s = budget_s
        self._timeout_s = timeout_s
        self._precision = precision
        self._warm_up_steps = warm_up_steps
        self._warmed_s = 0.0
        self._cycle = cycle
        self._is_lean = is_lean
        self._is_cycle_known = True
        self.num_steps = num_steps

    def started(self, before: SideAnswer, after: SideAnswer) -> None:
        """What both answered when they had taken their first steps; of several pairs of processes the last counts."""
        self._first = (before, after)
        self.num_starts += 1

    def run(self, before: SideProcess, after: SideProcess) -> None:
        """Order stretches in turn, the first of each pair alternating; both must have recorded, and stand.

        Raises Failed where the changed side alone ends by an error, or either runs out of a device's memory.
        """
        pairs = self._run(before, after)
        if pairs:
            self._sizes.append(pairs[-1])
            self._leak = self._leak or _leak(pairs)

    def _run(self, before: SideProcess, after: SideProcess) -> list[tuple[SideAnswer, SideAnswer]]:
        """What both answered, pair by pair."""
        size, spent_s, number, first = 1, 0.0, 0, len(self.stretches)
        pairs: list[tuple[SideAnswer, SideAnswer]] = []
        if not self._warm_up(after):
            return pairs
        while len(self.stretches) - first < _MOST_PAIRS:
            sides = (before, after) if number % 2 == 0 else (after, before)
            answers = {}
            for side in sides:
                side.order(size, is_lean=self._is_lean)
                answers[id(side)] = side.answer(timeout_s=self._timeout_s)
            one, two = answers[id(before)], answers[id(after)]
            self.has_ended = "ended" in (one.what, two.what)
            if self.has_ended:
                _check_how_they_ended(one, two)
                self.num_steps = min(a.num_steps for a in (one, two) if a.what == "ended")
                self.has_ended = len(self.stretches) - first < _FEWEST_PAIRS
                return pairs
            _check_finite(one, two)
            pairs.append((one, two))
            number += 1
            spent_s += one.seconds + two.seconds
            slower_s = max(one.seconds, two.seconds) / size
            done = max(one.num_steps, two.num_steps)
            num_workers = max(one.num_workers, two.num_workers)
            was_known = self._is_cycle_known
            self._learn_cycle(one, two, is_late=spent_s > _LONGEST_LEARNING * self._budget_s)
            cycle = self._cycle_of(num_workers, slower_s)
            num_cycles = max(ceil(_STRETCH_S / slower_s / cycle), self._fewest_cycles(num_workers, cycle, slower_s))
            wanted = max(1, min(self._most_steps(done), cycle * num_cycles))
            if not self._is_cycle_known:
                size = min(2 * size, self._most_steps(done))
            elif not was_known:
                size = wanted
            elif number > _WARM_UP_PAIRS and size >= 0.7 * wanted:
                self.stretches.append(PairedStretch(one.seconds, two.seconds, size))
                num = len(self.stretches) - first
                if num >= self._fewest_pairs() and (spent_s > self._budget_s or self._is_precise()):
                    return pairs
            elif number >= _WARM_UP_PAIRS:
                size = wanted
            num_missing = self._fewest_pairs() - (len(self.stretches) - first)
            longest = _LONGEST_RACE if self._cycle == 1 else _LONGEST_RACE_WITH_ROLLOUTS
            if spent_s > (longest if num_missing > 0 else 3) * self._budget_s:
                return pairs
        return pairs

    def _learn_cycle(self, one: SideAnswer, two: SideAnswer, *, is_late: bool) -> None:
        """Take over how many steps the sides have between two rollouts, once both have seen two."""
        if self._cycle:
            return
        cycles = [side.cycle for side in (one, two) if side.cycle is not None]
        self._is_cycle_known = all(cycles) or is_late
        if self._is_cycle_known:
            self._cycle = max((1, *cycles))

    def _cycle_of(self, num_workers: int, step_s: float) -> int:
        """How many steps belong together: batches of several workers come in bursts, and rollouts between updates."""
        return max(1, self._cycle, min(num_workers, int(_LONGEST_S / step_s)))

    def _fewest_cycles(self, num_workers: int, cycle: int, step_s: float) -> int:
        """Batches that workers have ready make a cycle of theirs shorter or longer by as much: several even that out."""
        if not 1 < num_workers <= cycle:  # no whole cycles, where steps are long
            return 1
        return max(1, min(_CYCLES, int(_LONGEST_CYCLES_S / (cycle * step_s))))

    def _warm_up(self, after: SideProcess) -> bool:
        """Take the changed side's steps that come before the race; whether the script has more."""
        if not self._warm_up_steps:
            return True
        after.order(self._warm_up_steps, is_lean=self._is_lean)
        answer = after.answer(timeout_s=self._timeout_s)
        self.has_ended = answer.what == "ended"
        if answer.what == "ended" and is_out_of_memory(answer.error):
            raise _ended_by_error("the changed script", answer)
        self._warmed_s = 0.0 if self.has_ended else answer.seconds
        if self.has_ended:
            self.num_steps = answer.num_steps
            self._warm_up_steps = 0  # it is shorter than that: what a run gains is what it gains on the way
        return not self.has_ended

    def _most_steps(self, done: int) -> int:
        """The most steps of a stretch when so many are done: enough stretches should fit into what the scripts have left."""
        if not self.num_steps:
            return _MOST_STEPS
        return max(1, min(_MOST_STEPS, (self.num_steps - done) // (_FEWEST_PAIRS + 1)))

    def speed(self) -> Speed | None:
        """What is known so far; None before the first pair."""
        if not self.stretches:
            return None
        before = [s.before_s / s.num_steps for s in self.stretches]
        after = [s.after_s / s.num_steps for s in self.stretches]
        ratio = ratio_estimate(before, after)
        before_s = median_estimate(before).value
        first_before, first_after = self._first or (SideAnswer(what="recorded"), SideAnswer(what="recorded"))
        num_warmed = self._warm_up_steps if self._warmed_s else 0
        return Speed(
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            num_pairs=len(self.stretches),
            before_s=before_s,
            after_s=before_s / ratio.value,
            num_first=first_after.num_steps + num_warmed,
            first_before_s=first_before.seconds + num_warmed * before_s,
            first_after_s=first_after.seconds + self._warmed_s,
            num_run=self.num_steps,
        )

    def footprints(self) -> tuple[Footprint, ...]:
        """Peaks of the host, then of the device, as medians over the pairs of processes."""
        found = []
        for device, peak in (("cpu", "peak_bytes"), (self._device, "device_peak_bytes")):
            pairs = [(getattr(one, peak), getattr(two, peak)) for one, two in self._sizes]
            if pairs and all(before for before, _ in pairs):
                fractions = [after / before for before, after in pairs]
                found.append(
                    Footprint(
                        device=device,
                        before_bytes=round(median(b for b, _ in pairs)),
                        after_bytes=round(median(a for _, a in pairs)),
                        fraction=(min(fractions), max(fractions)),
                    )
                )
        return tuple(found)

    def leak(self) -> str:
        """A sentence, if the later side's memory went on growing while the earlier's did not; else ''."""
        return self._leak

    @property
    def _device(self) -> str:
        return self._sizes[-1][0].device if self._sizes else "cpu"

    def _fewest_pairs(self) -> int:
        """Some more where all pairs but one say that the same side is faster."""
        ratios = sorted(s.before_s / s.after_s for s in self.stretches)
        is_enough = len(ratios) < _FEWEST_PAIRS or not (ratios[0] <= 1 < ratios[1] or ratios[-2] < 1 <= ratios[-1])
        return _FEWEST_PAIRS if is_enough else _PAIRS_WITH_AN_OUTLIER

    def _is_precise(self) -> bool:
        speed = self.speed()
        return speed is not None and speed.high - speed.low <= 2 * self._precision * speed.ratio


def _check_how_they_ended(before: SideAnswer, after: SideAnswer) -> None:
    """What a script ends with where it has no steps left, both sides end with."""
    for name, answer, other in (("the script before the change", before, after), ("the changed script", after, before)):
        is_own = answer is after and other.what != "ended"
        if answer.what == "ended" and answer.error and (is_own or is_out_of_memory(answer.error)):
            raise _ended_by_error(name, answer)


def _check_finite(before: SideAnswer, after: SideAnswer) -> None:
    if before.is_finite and not after.is_finite:
        raise Failed(
            f"weights of the changed script are no finite numbers any more after {after.num_steps} steps of the race; those of "
            "the script before the change are"
        )


def _ended_by_error(name: str, answer: SideAnswer) -> Failed:
    return Failed(f"{name} ended after {answer.num_steps} steps of the race: {answer.error}")


def _leak(pairs: list[tuple[SideAnswer, SideAnswer]]) -> str:
    """Whether the later side's peak grew from stretch to stretch, in both halves of a run, much more than the earlier's.

    What is kept for good grows nearly every time; peaks of batches whose sizes vary, only with a batch beyond all before.
    """
    rest = pairs[_WARM_UP_PAIRS:]
    if len(rest) < _FEWEST_PAIRS:
        return ""
    start, middle, end = rest[0], rest[len(rest) // 2], rest[-1]
    for peak in ("peak_bytes", "device_peak_bytes"):
        (before, after), (_, half), (before_end, after_end) = (
            (getattr(one, peak), getattr(two, peak)) for one, two in (start, middle, end)
        )
        floor = max(_LEAK_FLOOR_BYTES, _LEAK_FLOOR_SHARE * after)
        grown, allowed = after_end - after, floor + 4 * max(0, before_end - before)
        peaks = [getattr(two, peak) for _, two in rest]
        share = sum(b > a for a, b in pairwise(peaks)) / (len(peaks) - 1)
        if grown > allowed and after_end - half > 0.25 * grown and share >= _LEAKING_SHARE:
            steps = end[1].num_steps - start[1].num_steps
            each = grown / max(1, steps)
            return f"its memory grows by {each / 2**20:.3g} MiB a step ({grown / 2**20:.0f} MiB in {steps} steps)"
    return ""
