"""What a diagnosis consists of: findings, ranked, and what remains unexplained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal

from flatout.core.records.evidence import Evidence
from flatout.core.records.record import Record
from flatout.core.records.trial import Trial
from flatout.core.records.workload import LibraryFrame, Source

Regime = Literal["compute", "bandwidth", "overhead", "input", "communication", "capacity"]

Basis = Literal["trial", "timed", "estimate"]
"""Where a gain is from: the cure was tried; the time that goes was measured in the steps; or it follows from a model."""


NEAR_FLOOR: Final = 1.3
"""A step this many times its floor, or less, is called fast. The ceilings are those of a square product and a long copy; products
of a layer's shape reach 74 to 88 % of them (oneDNN on an EPYC, three scripts): a step of good kernels alone is so near."""


class Finding(Record, frozen=True, kw_only=True):
    """One cause that makes a step slow.

    `cost_s` is what the cause takes of a step now. `saved_s` is (low, high): what a cure would take off the step. `operators`
    are the indices of the operators whose time it claims and `phases` the phases it claims whole; both serve to merge
    findings that claim the same time. `basis` says where the gain is from. `regime` is filled in by the rule where it is None.

    `advice` says what its cure changes in the experiment (a larger batch): then `saved_s` is time saved for the same number of
    samples, and no gain of the step.

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
    advice: str = ""


class RankedFinding(Record, frozen=True, kw_only=True):
    """A finding as reported: file and line, the gain as [low, high] speed-ups of the whole step, and what it absorbed.

    `saved_bytes` of the `peak_bytes` of `device` would be saved; `steps_until_full` is when memory ends if it goes on growing by
    `growth_bytes_per_step`. `gain` is (1, 1) where only memory is at stake, and for advice: what changes the experiment is no
    gain of the step; `throughput` is then the [low, high] factor on samples a second.
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
    advice: str = ""
    throughput: tuple[float, float] = (1.0, 1.0)
    via: tuple[LibraryFrame, ...] = ()
    """The lines of packages below the user's line, outermost first, where the cause lies in a library."""
    is_cure: bool = False
    """Whether its time is also that of causes and of other cures, so that costs do not add up with it."""

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


PartKind = Literal[
    "data",
    "kernels",
    "dispatch",
    "python",
    "package",
    "memory",
    "communication",
    "wait",
    "idle",
    "phase",
    "cause",
]
"""kernels: operators of one family; dispatch: what torch spends on calling operators and on walking the graph; python: lines of
the script; package: code of an installed package below the script's lines; memory: the kernel's page faults; wait: the host waits
for the device; idle: the device waits for the host; phase: a phase that is not taken apart (evaluation); cause: what a finding
accounts for and nothing else does."""


class PartLine(Record, frozen=True, kw_only=True):
    """A line's share of a part of the step."""

    source: Source
    seconds: float


class PartOfStep(Record, frozen=True, kw_only=True):
    """Where some of a step goes: something a person can look at, measured by what `basis` names.

    Parts are disjoint. `floor_s` is the roofline's time for kernels, None where there is none; `num_calls` are the operators of
    the part in a step; `lines` those that take most of it, the longest first.
    """

    kind: PartKind
    name: str
    seconds: float
    floor_s: float | None = None
    num_calls: float = 0.0
    lines: tuple[PartLine, ...] = ()
    basis: str = ""

    @property
    def floor_fraction(self) -> float | None:
        """The floor over the time: 1 is as fast as the machine can. None where there is no floor."""
        return self.floor_s / self.seconds if self.floor_s is not None and self.seconds > 0 else None


class KernelTime(Record, frozen=True, kw_only=True):
    """All calls of an operator or compiled kernel on tensors of the same shapes in a step, beside their floor on the device.

    `floor_s` is the roofline's time of all calls; None where neither their FLOP nor their bytes are known.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    num_calls: float
    seconds: float
    floor_s: float | None

    @property
    def above_floor_s(self) -> float:
        """Seconds that better kernels could save at most; 0 where the floor is not known."""
        return max(0.0, self.seconds - self.floor_s) if self.floor_s is not None else 0.0


class BrokenLaw(Record, frozen=True, kw_only=True):
    """A claim that was left out because it contradicts what was measured."""

    law: Literal["floor", "cost"]
    """'floor': more than the measured time. 'cost': more than the step."""
    rule: str = ""
    text: str


class Diagnosis(Record, frozen=True, kw_only=True):
    """The answer: how long a step takes, how long it need take, and why it takes longer.

    `parts` and `unexplained_s` add up to `step_s`. `explained_s` is what the cures of the findings would save of it.
    """

    step_s: float
    floor_s: float | None
    explained_s: float
    unexplained_s: float
    """What no part of the step accounts for."""
    findings: tuple[RankedFinding, ...]
    notes: tuple[Note, ...]
    hot_lines: tuple[HotLine, ...]
    checked: tuple[str, ...]
    """Ids of the rules that looked and found nothing above the noise."""
    refused: tuple[str, ...] = ()
    """Hypotheses whose trial could not be run, and why."""
    broken: tuple[BrokenLaw, ...] = ()
    """Claims that are not made because they contradict the measured step."""
    parts: tuple[PartOfStep, ...] = ()
    """Where the step goes, the longest part first."""
    kernels: tuple[KernelTime, ...] = ()
    """On a device: the operators and compiled kernels that are furthest above their floor, the furthest first."""

    @property
    def is_near_floor(self) -> bool:
        """Whether little can be gained from this step on this machine."""
        return self.floor_s is not None and self.step_s <= NEAR_FLOOR * self.floor_s


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
    rewrites_line: bool = False
    """Whether its edits rewrite the code of the finding's own line, which nobody can do where a library's line is the cause."""
    is_cure: bool = False
    """The rule prices a change of how a whole module runs (its precision, compiling it). It comes after causes at a line, and is
    told beside them, since such cures multiply."""
