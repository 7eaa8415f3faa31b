"""How long comparisons of a search take: guessed before the first one, known by those before afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_FINAL_SHARE: Final = 1.5
"""The final proof takes so many times as long as the longest comparison, less what runs once for all that judge: it has more
processes."""
_FIRST_GUESS_S: Final = 10.0
"""What a comparison takes, before one has been made: 5 to 9 s for small models on two cores."""
_FIRST_GUESS_ON_DEVICE_S: Final = 60.0
"""The same on an H200, for scripts that other people wrote: 45 s (trl), 60 s (ResNet-50), 100 s (PPO)."""
_GUESSED_STEPS: Final = 60.0
"""Steps of the script that a comparison takes besides: eight in four forms, most of them recorded, and the race."""
_USUAL_STEPS: Final = 8
_COMPILED_STARTS: Final = 2.0
"""Times that a comparison waits for what the script compiles: its processes start in two groups, and each compiles anew. Of
nanoGPT as it comes, on an H200, a first trial took 155 s where 72 s were guessed without it."""
SHORT_RACE: Final = 0.5
"""The race of the final proof may be cut to this part of one before, where little of the budget is left."""


class Pace:
    """How long comparisons took, and so how long another one and the final proof should take.

    The effort of a lever is in starting it and in its first steps: a race takes as long with one as with another.
    """

    def __init__(self, guess_s: float = _FIRST_GUESS_S, race_s: float = 0.0) -> None:
        """Before a comparison has been made: `race_s` seconds of one are its race, and `guess_s` the rest."""
        self._guess_s = guess_s
        self._race_s = race_s
        self._started_s: list[float] = []
        self._raced_s: list[float] = []
        self._judged_s: list[float] = []

    @property
    def is_known(self) -> bool:
        """Whether a comparison has shown how long they take."""
        return bool(self._started_s)

    def add(self, seconds: float, effort: float, *, judged_s: float = 0.0, raced_s: float = 0.0) -> None:
        """A comparison of a lever with this effort has taken so long: of that, runs that judge others, too, and the race."""
        self._started_s.append(max(0.0, seconds - judged_s - raced_s) / effort)
        self._raced_s.append(raced_s)
        self._judged_s.append(judged_s)

    def needed_s(self, effort: float) -> float:
        """Seconds for a comparison of this effort and the final proof after it, whose random numbers are others."""
        if not self._started_s:
            return effort * self._guess_s + self._race_s + self.final_s()
        usual_s = effort * _mean(self._started_s) + _mean(self._raced_s)
        return usual_s + self.final_s() + max(self._judged_s)

    def alone_s(self, effort: float) -> float:
        """Seconds for a comparison of this effort, without the final proof."""
        if not self._started_s:
            return effort * self._guess_s + self._race_s
        return effort * _mean(self._started_s) + _mean(self._raced_s)

    def all_s(self, efforts: Sequence[float]) -> float:
        """Seconds for comparisons of these efforts, one after the other, and the final proof."""
        if not self._started_s:
            return sum(efforts) * self._guess_s + len(efforts) * self._race_s + self.final_s()
        return sum(efforts) * _mean(self._started_s) + len(efforts) * _mean(self._raced_s) + self.final_s()

    def final_s(self) -> float:
        """Seconds for the final proof, where what judges it is recorded; its race may be cut short."""
        if not self._started_s:
            return _FINAL_SHARE * self._guess_s + SHORT_RACE * self._race_s
        return self.final_start_s() + SHORT_RACE * max(self._raced_s)

    def least_final_s(self) -> float:
        """Seconds for the final proof with the processes of a trial, and for what judges it."""
        if not self._started_s:
            return self.final_s()
        return max(self._started_s) + SHORT_RACE * max(self._raced_s) + max(self._judged_s)

    def final_start_s(self) -> float:
        """Seconds of that for starting and first steps."""
        return _FINAL_SHARE * max(self._started_s, default=self._guess_s)


def guessed_start_s(is_on_device: bool, *, num_steps: int, step_s: float, compile_s: float) -> float:
    """Seconds that a comparison of so many steps should take besides its race, where none has shown it.

    `step_s` are those of a step of the script, and `compile_s` what it compiled for while it was observed.
    """
    usual_s = _FIRST_GUESS_ON_DEVICE_S if is_on_device else _FIRST_GUESS_S
    return usual_s + _GUESSED_STEPS * num_steps / _USUAL_STEPS * step_s + _COMPILED_STARTS * compile_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
