"""What came of tuning: the plan, what each of its levers was proved to do, the proof of them all, and what was left out."""

from __future__ import annotations

from typing import Literal

from flatout.records.lever import PlannedLever
from flatout.records.plan import Plan
from flatout.records.record import Record
from flatout.records.verdict import Verdict

Purpose = Literal["add", "swap", "drop", "final"]


class Attempt(Record, frozen=True, kw_only=True):
    """One comparison: the levers before and after, what for, and the Verdict."""

    purpose: Purpose
    before: tuple[PlannedLever, ...]
    after: tuple[PlannedLever, ...]
    lever: str
    verdict: Verdict


class LeftOut(Record, frozen=True, kw_only=True):
    """A lever that is not in the plan, and why; `is_for_script`: it was proposed for it, and not refused by itself."""

    lever: str
    because: str
    is_for_script: bool = True


class Rung(Record, frozen=True, kw_only=True):
    """A lever of the plan with the Verdict that let it in, on top of the levers of that moment; None if that is not known."""

    planned: PlannedLever
    verdict: Verdict | None = None


class Tuned(Record, frozen=True, kw_only=True):
    """The plan (maybe empty) with a rung for each of its levers, and its proof against the untouched script."""

    plan: Plan
    rungs: tuple[Rung, ...] = ()
    proof: Verdict | None = None
    left_out: tuple[LeftOut, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    """Everything that was compared, in order."""
    is_complete: bool = True
    """Whether everything was tried before the time was up."""
