"""What changed between two runs: before and after, matched line by line.

A ratio is always after over before: 1.3 is 1.3 times slower (or larger), 0.5 half.
"""

from __future__ import annotations

from typing import Literal

from flatout.core.records.evidence import StepKind
from flatout.core.records.finding import RankedFinding
from flatout.core.records.record import Record


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


class LineChange(Record, frozen=True, kw_only=True):
    """Seconds of a step that a line took, matched by file, function and text; a line of 0 is 0 in the run that lacks it.

    `file` is relative to the folder the script ran in. The ratio has an interval where the seconds are samples.
    """

    file: str
    function: str
    text: str
    line_before: int | None
    line_after: int | None
    before_s: float
    after_s: float
    ratio: Ratio | None = None


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
    decision: Decision | None = None
