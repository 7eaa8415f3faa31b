"""A plan while it is searched: its levers, how long a step takes with them, and what one more would change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Final

from flatout.core.records.lever import Candidate, Lever, Parameters, PlannedLever
from flatout.core.records.verdict import GUARANTEES, Guarantee
from flatout.machine.cost.accounting import speed_up
from flatout.tune.search.goal import SearchGoal

_MOST: Final = 0.9
"""No lever is promised to save more than this share of a step."""
_CARRIES_OVER: Final = 1.25
"""What a trial at a line saved, the whole step saves within this factor (35 of 42 scripts, bench/results, check_examples)."""
_SMALLEST_GAIN: Final = 1.02
"""A lever whose best promise is below this is not tried: no interval on an ordinary machine would exclude 1."""
MUCH_SMALLER: Final = 0.95
"""Of the peak: what saves less memory at the same speed is not worth another lever in a plan, in our judgement."""


class PlanSoFar:
    """The levers of a plan, on top of each other in this order, and the seconds of a step with them."""

    def __init__(self, known: Mapping[str, Lever], goal: SearchGoal, candidates: Sequence[Candidate]) -> None:
        self.levers: tuple[PlannedLever, ...] = ()
        self.step_s = goal.step_s
        self.needed: set[str] = set()
        """Levers without which the plan would not fit."""
        self._known = known
        self._goal = goal
        self._promised_s = {(c.lever, settings_of(c.parameters)): c.saved_s[1] for c in candidates}
        """Seconds that levers promise to save at most, by lever and settings."""
        self._replaces = {(c.lever, settings_of(c.parameters)): c.replaces for c in candidates}

    def displaced(self, candidate: Candidate) -> tuple[PlannedLever, ...]:
        """What of the plan the candidate would replace: what it does not go with, and itself with other parameters.

        A lever that changes the text at another place is another lever.
        """
        lever = self._known[candidate.lever]
        return tuple(
            p
            for p in self.levers
            if (p.id == lever.id and (not lever.is_local or _place(p.parameters) == _place(candidate.parameters)))
            or p.id in (*lever.conflicts, *candidate.replaces)
            or lever.id in (*self._known[p.id].conflicts, *self._replaced_by(p))
        )

    def _replaced_by(self, planned: PlannedLever) -> tuple[str, ...]:
        """The levers whose work one of the plan does as well."""
        return self._replaces.get((planned.id, settings_of(planned.parameters)), ())

    def most_gain(self, candidate: Candidate) -> float:
        """How many times as fast a lever could make the step as it is now."""
        return self.predicted(candidate)[1]

    def predicted(self, candidate: Candidate) -> tuple[float, float]:
        """How many times as fast a lever should make the step as it is now, from - to."""
        low_s, high_s = self.expected_saving(candidate)
        return speed_up(self.step_s, low_s), speed_up(self.step_s, high_s)

    def planned(self, candidate: Candidate) -> PlannedLever:
        """The candidate as the next lever of the plan."""
        lever = self._known[candidate.lever]
        return PlannedLever(
            id=lever.id,
            guarantee=guarantee_of(lever, candidate),
            parameters=candidate.parameters,
            predicted=self.predicted(candidate),
            warm_up_steps=candidate.warm_up_steps,
            because=candidate.because,
        )

    def with_one_more(self, candidate: Candidate) -> PlanSoFar:
        """A plan like this one with the candidate as its last lever, as if nothing were known of what it gains."""
        other = copy(self)
        other.levers = (*self.levers, self.planned(candidate))
        return other

    def expected_saving(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds that a lever may save of the step as it is now, when it was promised for the untouched one.

        What others took may have been what this lever is for, or not at all: from what they left of it up to all it promised.
        """
        low, high = candidate.saved_s
        taken_s = max(0.0, self._goal.step_s - self.step_s)
        low = max(0.0, low / _CARRIES_OVER - taken_s) if low > 0 else low
        return min(low, _MOST * self.step_s), min(_CARRIES_OVER * high, _MOST * self.step_s)

    def predicted_saving(self, candidates: Sequence[Candidate]) -> float:
        """The share of a step that these should save together, in the middle between least and most: each saves of what others
        leave.
        """
        left = [1.0, 1.0]
        for candidate in candidates:
            for bound, saved_s in enumerate(self.expected_saving(candidate)):
                left[bound] *= 1.0 - min(1.0, max(0.0, saved_s / self.step_s))
        return 1.0 - sum(left) / 2

    def effort_of(self, lever: str, parameters: Parameters) -> float:
        """How many times as long a comparison of this lever takes as others."""
        return self._goal.effort_of(self._known[lever], parameters)

    def is_too_little(self, candidate: Candidate, *, beside: Sequence[Candidate] = ()) -> bool:
        """Whether a candidate could gain too little to be told from noise, of a step that these others have made shorter.

        They are taken to save as much as they may: a gain that is small now may be much of the step that they leave, and to try
        one more beside them takes no longer.
        """
        saved_s = sum(max(0.0, self.expected_saving(other)[1]) for other in beside)
        left_s = max((1 - _MOST) * self.step_s, self.step_s - saved_s)
        return speed_up(left_s, min(self.expected_saving(candidate)[1], _MOST * left_s)) < _SMALLEST_GAIN

    def is_much_smaller(self, candidate: Candidate) -> bool:
        """Whether a candidate should make a step so much smaller, where memory is a device's, that it is welcome at no cost."""
        return self._goal.is_on_device and candidate.saved_bytes > (1 - MUCH_SMALLER) * self._goal.peak_bytes > 0

    def why_not(self, candidate: Candidate) -> str:
        """Why a candidate is not worth a trial; '' where it is."""
        most = self.most_gain(candidate)
        if most < _SMALLEST_GAIN:
            return f"it could make a step {most:.2f}x faster at most, too little to be told from noise"
        return self.clash(candidate)

    def is_planned(self, candidate: Candidate) -> bool:
        """Whether the plan has this lever with these parameters."""
        return any((p.id, p.parameters) == (candidate.lever, candidate.parameters) for p in self.levers)

    def clash(self, candidate: Candidate) -> str:
        """What in the plan the candidate does not go with, where that saves more; '' where nothing does."""
        if self.is_planned(candidate):
            return "it is in the plan"
        others = self.displaced(candidate)
        if not others:
            return ""
        if same := [p.id for p in others if candidate.lever in self._replaced_by(p)]:
            return f"{same[0]} does its work as well"
        if self.needed & {p.id for p in others}:
            return f"it does not go with {others[0].id}, without which the plan would not fit"
        # of what came in as one with others nothing but its promise is known
        promised_s = sum(self._promised_s.get((p.id, settings_of(p.parameters)), 0.0) for p in others if not p.measured)
        if self._goal.objective == "time" and promised_s > max(0.0, candidate.saved_s[1]):
            return f"it does not go with {others[0].id}, which promises more"
        without_s = self.step_s * gain_of(others)
        if speed_up(without_s, min(candidate.saved_s[1], _MOST * without_s)) > gain_of(others):
            return ""
        if others[0].id == candidate.lever:
            return f"as {settings_of(candidate.parameters)}: the way that is in the plan saves more than it promises"
        return f"it does not go with {others[0].id}, which saves more than it promises"


def guarantee_of(lever: Lever, candidate: Candidate) -> Guarantee:
    """What a candidate promises: as much as its lever, or less where it says so."""
    return max(lever.guarantee, candidate.guarantee or lever.guarantee, key=GUARANTEES.index)


def gain_of(levers: Sequence[PlannedLever]) -> float:
    """What they gained, one on top of the other; 1 where nothing was measured."""
    return math.prod(max(1.0, p.measured[0]) if p.measured is not None else 1.0 for p in levers)


def _place(parameters: Parameters) -> tuple[object, ...]:
    """Where a lever changes the text."""
    return tuple(parameters.get(part) for part in ("file", "function", "code"))


def settings_of(parameters: Parameters) -> str:
    """The parameters of a lever in words."""
    return ", ".join(f"{k}={v}" for k, v in parameters.items()) or "it is by default"
