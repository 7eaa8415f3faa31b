"""What a rule suspects, with the trial that would price it: which trials are worth their time, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import Trial, TrialResult
from flatout.machine.cost.accounting import operator_seconds, remaining_fraction, result_of


class Suspect(Protocol):
    """Operators, and the trial that shows what a cure leaves of their time."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    @property
    def trial(self) -> Trial: ...


R = TypeVar("R", bound=Trial)
S = TypeVar("S", bound=Suspect)
Suspects = Callable[[Evidence], Iterable[S]]


class SuspectRows(NamedTuple, Generic[R]):
    """A suspect of which no more is known."""

    rows: tuple[int, ...]
    trial: R


class PricedSuspect(NamedTuple, Generic[S]):
    """A suspect whose trial ran: the seconds of its operators in a step, and the fraction of them that a cure leaves."""

    suspect: S
    result: TrialResult
    cost_s: float
    remaining: float

    @property
    def saved_s(self) -> float:
        """Seconds of a step that go, 0 where the cure is no faster."""
        return self.cost_s * max(0.0, 1 - self.remaining)


def proposing(suspects: Suspects[S], *, worth: float) -> Callable[[Evidence], Iterator[Trial]]:
    """The `propose` of a rule: the trials of those suspects that take more than the fraction `worth` of a step."""

    def propose(evidence: Evidence) -> Iterator[Trial]:
        for suspect in suspects(evidence):
            if operator_seconds(evidence, suspect.rows) > worth * evidence.steps.step_s:
                yield suspect.trial

    return propose


def tried(evidence: Evidence, suspects: Suspects[S]) -> Iterator[PricedSuspect[S]]:
    """The suspects whose trials have run."""
    for suspect in suspects(evidence):
        result = result_of(evidence, suspect.trial)
        if result is not None:
            yield PricedSuspect(suspect, result, operator_seconds(evidence, suspect.rows), remaining_fraction(result))
