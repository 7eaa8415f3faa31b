"""What a diagnosis consists of: findings, ranked, and what remains unexplained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from flatout.core.records.evidence import Evidence
from flatout.core.records.record import Record
from flatout.core.records.trial import Trial
from flatout.core.records.workload import Source

Regime = Literal["compute", "bandwidth", "overhead", "input", "communication", "capacity"]

Basis = Literal["trial", "timed", "estimate"]
"""Where a gain is from: the cure was tried; the time that goes was measured in the steps; or it follows from a model."""


class Finding(Record, frozen=True, kw_only=True):
    """One cause that makes a step slow.

    `cost_s` is what the cause takes of a step now. `saved_s` is (low, high): what a cure would take off the step. `operators`
    are the indices of the operators whose time it claims and `phases` the phases it claims whole; both serve to merge
    findings that claim the same time. `basis` says where the gain is from. `regime` is filled in by the rule where it is None.

    A cause that takes memory says how many bytes of `device`'s peak a cure would save, or how fast memory grows because of it.
    """

    rule: str = ""
    regime: Regime | None = None
    where: Source | None
    cost_s: float = 0.0
    saved_s: tuple[float, float] = (0.0, 0.0)
    because: str
    edit: str
    also: tuple[Source, ...] = ()
    module: str = ""
    levers: tuple[str, ...] = ()
    operators: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    basis: Basis = "estimate"
    saved_bytes: int = 0
    growth_bytes_per_step: int = 0
    device: str = "cpu"


class RankedFinding(Record, frozen=True, kw_only=True):
    """A finding as reported: file and line, the gain as [low, high] speed-ups of the whole step, and what it absorbed.

    `saved_bytes` of the `peak_bytes` of `device` would be saved; `steps_until_full` is when memory ends if it goes on growing by
    `growth_bytes_per_step`. `gain` is (1, 1) where only memory is at stake.
    """

    rule: str
    title: str
    file: str
    line: int
    regime: Regime
    cost_s: float
    share: float
    gain: tuple[float, float]
    because: str
    edit: str
    text: str
    also: tuple[Source, ...]
    module: str
    levers: tuple[str, ...]
    basis: Basis
    merged: tuple[str, ...] = ()
    saved_bytes: int = 0
    peak_bytes: int = 0
    growth_bytes_per_step: int = 0
    steps_until_full: float | None = None
    device: str = "cpu"

    @property
    def saves_time(self) -> bool:
        """Whether the step gets faster; else memory alone is at stake."""
        return self.gain[1] > 1.0


class Note(Record, frozen=True, kw_only=True):
    """Something true and worth knowing that costs nothing measurable here."""

    rule: str = ""
    where: Source | None
    text: str


class HotLine(Record, frozen=True, kw_only=True):
    """A line's work against the roofline: all its operators, forward and backward, in one step."""

    source: Source
    seconds: float
    python_s: float
    flop: int
    bytes: int
    floor_s: float | None
    """None where the rates measured here give more than the line took."""
    regime: Regime

    @property
    def intensity(self) -> float:
        """FLOP per byte moved; 0 when nothing was moved."""
        return self.flop / self.bytes if self.bytes else 0.0

    @property
    def flop_per_s(self) -> float:
        """The rate reached: FLOP over the line's whole time."""
        return self.flop / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth reached: bytes over the line's whole time."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class BrokenLaw(Record, frozen=True, kw_only=True):
    """A claim that was left out because it contradicts what was measured."""

    law: Literal["floor", "cost"]
    """'floor': more than the measured time. 'cost': more than the step."""
    rule: str = ""
    text: str


class Diagnosis(Record, frozen=True, kw_only=True):
    """The answer: how long a step takes, how long it need take, and why it takes longer."""

    step_s: float
    floor_s: float | None
    explained_s: float
    unexplained_s: float
    findings: tuple[RankedFinding, ...]
    notes: tuple[Note, ...]
    hot_lines: tuple[HotLine, ...]
    checked: tuple[str, ...]
    """Ids of the rules that looked and found nothing above the noise."""
    refused: tuple[str, ...] = ()
    """Hypotheses whose trial could not be run, and why."""
    broken: tuple[BrokenLaw, ...] = ()
    """Claims that are not made because they contradict the measured step."""


class Rule(Record, frozen=True, kw_only=True):
    """A pattern that hurts: how to suspect it, how to price it, how to report it.

    `propose` yields the trials that would price it; `check` decides with what they measured; `note` yields what is worth
    knowing although it costs nothing here. All three are pure functions of the Evidence.
    """

    id: str
    title: str
    module: str
    check: Callable[[Evidence], Iterator[Finding]]
    propose: Callable[[Evidence], Iterator[Trial]] | None = None
    note: Callable[[Evidence], Iterator[Note]] | None = None
    levers: tuple[str, ...] = ()
    is_general: bool = False
    """A general rule names a symptom; it stays silent where rules that name a cause explain the same time."""
