"""What changed between two runs: before and after, matched line by line.

A ratio is always after over before: 1.3 is 1.3 times slower (or larger), 0.5 half.
"""

from __future__ import annotations

from typing import Final, Literal

from flatout.core.records.evidence import StepKind
from flatout.core.records.finding import RankedFinding
from flatout.core.records.record import Record

LEAST_FRACTION: Final = 0.01
"""A change below this share of the longer step is no news: it is neither listed nor called clear."""
SAME_WORK_FRACTION: Final = 0.05
"""Batches of changing length let the FLOP of a step differ by so much between two runs of one script."""
USUAL_FRACTION: Final = 0.04
"""Two runs of one script on a shared machine differ by up to this (diagnosis.SMALLEST_FRACTION)."""


class Ratio(Record, frozen=True, kw_only=True):
    """The figure after over the one before, with its 95 % interval; the ends are None where too little was observed for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def direction(self) -> Literal["more", "less", "unclear"]:
        """Whether it became 'more' or 'less', when the whole interval lies on that side of 1, or 'unclear'."""
        if self.low is not None and self.low > 1:
            return "more"
        return "less" if self.high is not None and self.high < 1 else "unclear"


class TimeChange(Record, frozen=True, kw_only=True):
    """Seconds of a step that a phase took; no ratio where one of the two is 0."""

    name: str
    before_s: float
    after_s: float
    ratio: Ratio | None = None

    @property
    def change_s(self) -> float:
        """Seconds that were added; below 0 where it takes less time."""
        return self.after_s - self.before_s


class FindingChange(Record, frozen=True, kw_only=True):
    """One finding, matched by rule, file, function and the text of its line.

    'moved' means that its line number or file is another now; `before` is None for one that appeared, `after` for one that
    vanished (cured, or now too small a share of the step). The files are relative to the folders the scripts ran in.
    """

    kind: Literal["appeared", "vanished", "moved", "stayed"]
    before: RankedFinding | None
    after: RankedFinding | None
    file_before: str = ""
    file_after: str = ""


class MovedFunction(Record, frozen=True, kw_only=True):
    """A function whose lines stand in another file now: that was renamed, or the function was moved.

    `function` is its qualified name, '<module>' for the code of a module itself. The files are relative to the folders that the
    scripts ran in.
    """

    function: str
    file_before: str
    file_after: str


class LineChange(Record, frozen=True, kw_only=True):
    """Seconds of a step that a line took, matched by file, function and text; a line of 0 is 0 in the run that lacks it.

    `file` is relative to the folder the script ran in, and that of the run after where the line is in both. The ratio has an
    interval where the seconds are samples. Calls and FLOP of operators are those of a step, 0 where none was seen; unlike
    seconds they do not depend on what else the machine does.
    """

    file: str
    function: str
    text: str
    line_before: int | None
    line_after: int | None
    before_s: float
    after_s: float
    ratio: Ratio | None = None
    calls_before: float = 0.0
    calls_after: float = 0.0
    flop_before: float = 0.0
    flop_after: float = 0.0

    @property
    def change_s(self) -> float:
        """Seconds that were added; below 0 where it takes less time."""
        return self.after_s - self.before_s

    @property
    def is_certainly_slower(self) -> bool:
        """Whether it is more than a busy machine that makes it slower: the line is new, does more, or its interval says so."""
        more = 1 + SAME_WORK_FRACTION
        does_more = self.calls_after > more * self.calls_before or self.flop_after > more * self.flop_before
        is_clear = self.ratio is not None and self.ratio.direction == "more"
        return self.change_s > 0 and (self.line_before is None or does_more or is_clear)


class SizeChange(Record, frozen=True, kw_only=True):
    """Bytes at the peak of a step on one device."""

    device: str
    before_bytes: int
    after_bytes: int


class RunDifference(Record, frozen=True, kw_only=True):
    """Something besides the code that differs.

    'environment': machine, versions, threads; then the ratio is not the script's doing alone. 'work': a step does other work
    (batch, parameters, FLOP); then a ratio of steps is none of samples. 'command': arguments and settings.
    """

    kind: Literal["environment", "work", "command"]
    name: str
    before: str
    after: str


class Decision(Record, frozen=True, kw_only=True):
    """The answer to "is it slower by more than `threshold`?" (0.05 for 5 %), from the interval of the step's ratio."""

    threshold: float
    outcome: Literal["slower", "not slower", "cannot tell"]


class Comparison(Record, frozen=True, kw_only=True):
    """Two runs side by side. Lines and findings come with the largest change first."""

    kind_before: StepKind
    kind_after: StepKind
    step: TimeChange
    """The ordinary step, its median; evaluation passes are among the phases."""
    num_before: int
    num_after: int
    phases: tuple[TimeChange, ...]
    findings: tuple[FindingChange, ...]
    lines: tuple[LineChange, ...]
    sizes: tuple[SizeChange, ...] = ()
    differences: tuple[RunDifference, ...] = ()
    moved_functions: tuple[MovedFunction, ...] = ()
    decision: Decision | None = None

    @property
    def least_s(self) -> float:
        """Seconds below which a change is no news."""
        return LEAST_FRACTION * max(self.step.before_s, self.step.after_s)

    @property
    def changed_phases(self) -> tuple[TimeChange, ...]:
        """Phases that changed beyond doubt, whatever the step as a whole did; the largest change first.

        The interval of the ratio excludes 1, or the phase is in one run alone; and it changed by more than two runs of one
        script differ by, and by an amount that counts in a step.
        """
        found = [p for p in self.phases if abs(p.change_s) >= self.least_s and _is_clear(p.ratio)]
        return tuple(sorted(found, key=lambda p: -abs(p.change_s)))

    @property
    def is_slower(self) -> bool:
        """Whether the step, or a phase of it, takes longer beyond doubt: by more than two runs of one script differ."""
        ratio = self.step.ratio
        is_step = ratio is not None and ratio.direction == "more" and _is_clear(ratio)
        is_decided = self.decision is not None and self.decision.outcome == "slower"
        return is_step or is_decided or any(phase.change_s > 0 for phase in self.changed_phases)

    @property
    def slower_lines(self) -> tuple[LineChange, ...]:
        """Lines that are there now and take longer than before; the largest change first.

        An edited line is one gone and one new: a new line counts where its function as a whole takes longer.
        """
        added_s: dict[tuple[str, str], float] = {}
        for line in self.lines:
            place = (line.file, line.function)
            added_s[place] = added_s.get(place, 0.0) + line.change_s
        return tuple(
            line
            for line in self.lines
            if line.line_after is not None
            and line.change_s >= self.least_s
            and (line.ratio is None or line.ratio.value - 1 >= USUAL_FRACTION)
            and (line.line_before is not None or added_s[line.file, line.function] >= self.least_s)
        )


def _is_clear(ratio: Ratio | None) -> bool:
    """Whether a time changed beyond doubt: it is in one run alone, or its ratio lies clear of 1 and of what is usual."""
    return ratio is None or (ratio.direction != "unclear" and abs(ratio.value - 1) >= USUAL_FRACTION)
