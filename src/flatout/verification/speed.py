"""Two standing scripts take stretches of the same steps in turn: how much faster is one of them?"""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.measure.stats import median_estimate, ratio_estimate
from flatout.records.verdict import Speed
from flatout.verification.process import StageProcess
from flatout.verification.stage import Answer

_STRETCH_S: Final = 0.25
"""Of the slower side: long beside a turn, short beside what changes on a machine."""
_FEWEST_PAIRS: Final = 7
"""Below, no interval of a median reaches 95 % with room for one outlier (n = 6: the whole range)."""
_MOST_PAIRS: Final = 60
_WARM_UP_PAIRS: Final = 2
_MOST_STEPS: Final = 2000


class Stretch(NamedTuple):
    """Seconds of the same steps on both sides."""

    before_s: float
    after_s: float
    num_steps: int


class Race:
    """Measures until the interval is narrow enough, the time is up, or a script has no steps left."""

    def __init__(self, *, budget_s: float, timeout_s: float, precision: float = 0.01) -> None:
        """`budget_s` is for one run of two processes; `precision` the relative half width of the interval that is enough."""
        self.stretches: list[Stretch] = []
        self.has_ended = False
        self.last: tuple[Answer, Answer] | None = None
        self._budget_s = budget_s
        self._timeout_s = timeout_s
        self._precision = precision
        self._most_steps = _MOST_STEPS

    def run(self, before: StageProcess, after: StageProcess) -> None:
        """Order stretches in turn, the first of each pair alternating; both must have recorded, and stand."""
        size, spent_s, number, first = 1, 0.0, 0, len(self.stretches)
        while len(self.stretches) - first < _MOST_PAIRS:
            sides = (before, after) if number % 2 == 0 else (after, before)
            answers = {}
            for side in sides:
                side.order(size)
                answers[id(side)] = side.answer(timeout_s=self._timeout_s)
            one, two = answers[id(before)], answers[id(after)]
            self.has_ended = "ended" in (one.what, two.what)
            if self.has_ended:  # shorter stretches when the scripts are started again
                self._most_steps = max(1, size // 4)
                return
            self.last = (one, two)
            number += 1
            spent_s += one.seconds + two.seconds
            slower_s = max(one.seconds, two.seconds) / size
            wanted = max(1, min(self._most_steps, round(_STRETCH_S / slower_s)))
            if number > _WARM_UP_PAIRS and size >= 0.7 * wanted:
                self.stretches.append(Stretch(one.seconds, two.seconds, size))
                num = len(self.stretches) - first
                if num >= _FEWEST_PAIRS and (spent_s > self._budget_s or self._is_precise()):
                    return
            elif number >= _WARM_UP_PAIRS:
                size = wanted
            if spent_s > 3 * self._budget_s:
                return

    def speed(self) -> Speed | None:
        """What is known so far; None before the first pair."""
        if not self.stretches:
            return None
        before = [s.before_s / s.num_steps for s in self.stretches]
        after = [s.after_s / s.num_steps for s in self.stretches]
        ratio = ratio_estimate(before, after)
        return Speed(
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            num_pairs=len(self.stretches),
            before_s=median_estimate(before).value,
            after_s=median_estimate(after).value,
        )

    def _is_precise(self) -> bool:
        speed = self.speed()
        return speed is not None and speed.high - speed.low <= 2 * self._precision * speed.ratio
