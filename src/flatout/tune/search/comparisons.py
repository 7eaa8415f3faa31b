"""Comparisons made by workers elsewhere, ahead of when the search asks for them.

A search tries one lever after the other, each on top of those that it has adopted. What it will try next is known as long as it
adopts nothing: workers compare that meanwhile. When it does adopt something, what they are at is given up.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from flatout.core.errors import UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.lever import Lever, PlannedLever
from flatout.core.records.plan import Plan, to_toml
from flatout.core.records.record import Record
from flatout.core.records.verdict import Verdict
from flatout.tune.search.search_log import lever_key
from flatout.tune.verify.proof import ScriptProver
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

Key = tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


class LeverComparison(Record, frozen=True, kw_only=True):
    """One comparison of two lists of levers on a script: all that a process elsewhere needs, where it sees the same files."""

    script: Request
    plan: Plan
    before: tuple[PlannedLever, ...]
    after: tuple[PlannedLever, ...]
    usual_terms: ProofTerms
    terms: ProofTerms

    @classmethod
    def of(
        cls,
        script: Request,
        plan: Plan,
        sides: tuple[Sequence[PlannedLever], Sequence[PlannedLever]],
        *,
        usual_terms: ProofTerms,
        terms: ProofTerms,
    ) -> LeverComparison:
        """The comparison of two lists of levers, within terms that JSON can hold, which knows no infinity."""
        usual_terms, terms = (
            msgspec.structs.replace(t, decisive=min(t.decisive, sys.float_info.max)) for t in (usual_terms, terms)
        )
        before, after = map(tuple, sides)
        return cls(script=script, plan=plan, before=before, after=after, usual_terms=usual_terms, terms=terms)

    @property
    def key(self) -> Key:
        """What tells comparisons of one search apart."""
        return lever_key(self.before), lever_key(self.after)


class Task(Protocol):
    """A comparison that a worker makes."""

    def verdict(self, timeout_s: float) -> Verdict | None:
        """What it found, waited for so long; None where the worker failed, or is not done."""

    def cancel(self) -> None:
        """Give it up; nothing happens where it is done."""


class Workers(Protocol):
    """Where comparisons are made: so many at a time, each on a machine like this one."""

    number: int

    def start(self, comparisons: Sequence[LeverComparison]) -> Sequence[Task]:
        """Begin them all. Raises UsageError when the scheduler refuses."""


def compare_here(comparison: LeverComparison, levers: Mapping[str, Lever]) -> Verdict:
    """Make a comparison in this process; what a worker does.

    Raises VerificationError when the script before the change does not run.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-tune-") as folder:
        before, after = (
            request_with(comparison.script, comparison.plan, side, levers, Path(folder) / f"{name}.toml")
            for name, side in (("before", comparison.before), ("after", comparison.after))
        )
        with ScriptProver(comparison.script, comparison.usual_terms) as prover:
            return prover.prove(before, after, comparison.terms)


def request_with(
    script: Request, plan: Plan, levers: Sequence[PlannedLever], known: Mapping[str, Lever], path: Path
) -> Request:
    """The script with these levers, whose plan is written to `path`; without any, the script itself."""
    if not levers:
        return script
    write_whole_file(path, to_toml(msgspec.structs.replace(plan, lever=tuple(levers))))
    environment: dict[str, str] = {}
    for planned in levers:
        variables = known[planned.id].environment
        environment |= variables(planned.parameters) if variables is not None else {}
    return msgspec.structs.replace(script, plan=str(path), environment=environment)


class ComparisonsAhead:
    """The comparisons that workers are at; those that the search does not come to any more are given up."""

    def __init__(self, workers: Workers, *, device: str, on_progress: Callable[[str], None]) -> None:
        self._workers = workers
        self._device = device
        self._on_progress = on_progress
        self._tasks: dict[Key, Task] = {}

    def expect(self, comparisons: Sequence[LeverComparison]) -> None:
        """Have workers begin with the first of those that the search will come to, and give up all others."""
        wanted = {comparison.key: comparison for comparison in comparisons}
        for key in [key for key in self._tasks if key not in wanted]:
            self._tasks.pop(key).cancel()
        room = self._workers.number - len(self._tasks)
        new = [comparison for key, comparison in wanted.items() if key not in self._tasks][: max(0, room)]
        if new:
            self._tasks.update(zip((c.key for c in new), self._workers.start(new), strict=True))

    def take(self, comparison: LeverComparison, *, timeout_s: float) -> Verdict | None:
        """The Verdict of a worker on this comparison, waited for so long; None where none is at it, or it failed.

        Raises UsageError when it ran on another device than the rest of the search.
        """
        task = self._tasks.pop(comparison.key, None)
        if task is None:
            return None
        verdict = task.verdict(timeout_s)
        if verdict is None:
            task.cancel()
            self._on_progress("a worker has failed; the comparison is made here")
        elif verdict.device != self._device:
            raise UsageError(
                f"a worker has '{verdict.device}', and the script was observed on '{self._device}'; choose workers with the "
                "same device"
            )
        return verdict

    def end(self) -> None:
        """Give up all that workers are at."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
